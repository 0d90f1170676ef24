#include "pariskv/decode/instance.cuh"

namespace pariskv::cuda {

template DecodeKernels decode_kernels<float>(int64_t rotated_dim);

}  // namespace pariskv::cuda
