#include "prkv/decode/instance.cuh"

namespace pariskv::cuda {

template PageKernels page_kernels<float>(int64_t rotated_dim);

}  // namespace pariskv::cuda
