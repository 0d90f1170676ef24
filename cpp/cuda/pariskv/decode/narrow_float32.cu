#include "pariskv/decode/row_kernels.cuh"

namespace pariskv::cuda {

template void set_narrow_kernels<float>(int64_t rotated_dim, DecodeKernels& kernels);

}  // namespace pariskv::cuda
