#include "prkv/decode/instance.cuh"

namespace pariskv::cuda {

template PageKernels page_kernels<__half>(int64_t rotated_dim);

}  // namespace pariskv::cuda
