#include "decode.cuh"

namespace pariskv::cuda {

template void launch_decode_as<__nv_bfloat16>(const DecodeCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
