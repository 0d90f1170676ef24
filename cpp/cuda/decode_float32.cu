#include "decode.cuh"

namespace pariskv::cuda {

template void launch_decode_as<float>(const DecodeCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
