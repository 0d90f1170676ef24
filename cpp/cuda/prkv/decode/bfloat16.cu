#include "prkv/decode/instance.cuh"

namespace pariskv::cuda {

template PageKernels page_kernels<__nv_bfloat16>(int64_t key_dim);

}  // namespace pariskv::cuda
