#include "pariskv/decode/row_kernels.cuh"

namespace pariskv::cuda {

template void set_narrow_kernels<__nv_bfloat16>(int64_t rotated_dim, DecodeKernels& kernels);

}  // namespace pariskv::cuda
