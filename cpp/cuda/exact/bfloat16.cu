#include "exact/instance.cuh"

namespace pariskv::cuda {

template ExactKernel exact_kernel<__nv_bfloat16>(const RowFormat& rows);

}  // namespace pariskv::cuda
