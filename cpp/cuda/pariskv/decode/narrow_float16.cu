#include "pariskv/decode/row_kernels.cuh"

namespace pariskv::cuda {

template void set_narrow_kernels<__half>(int64_t rotated_dim, DecodeKernels& kernels);

}  // namespace pariskv::cuda
