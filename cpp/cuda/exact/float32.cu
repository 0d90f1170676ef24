#include "exact/instance.cuh"

namespace pariskv::cuda {

template ExactKernel exact_kernel<float>(const RowFormat& rows);

}  // namespace pariskv::cuda
