#include "prkv/decode/instance.cuh"

namespace pariskv::cuda {

template PageKernels page_kernels<float>(int64_t key_dim);

}  // namespace pariskv::cuda
