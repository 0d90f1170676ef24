#include "exact/instance.cuh"

namespace pariskv::cuda {

template ExactKernel exact_kernel<__half>(const RowFormat& rows);

}  // namespace pariskv::cuda
