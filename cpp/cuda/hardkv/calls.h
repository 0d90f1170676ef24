/** HARD-KV's step, as the host asks for it. The launcher is in decode/launch.cu. */
#pragma once

#include <cuda_runtime_api.h>

#include "tables.h"

namespace pariskv::cuda {

/** Attention to resident and kept rows. Of a lane's scratch `resident` alone is there. */
struct KeptDecodeCall : StepCall {};
void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream);
/** Of the scratch of a lane, for each kv head. */
int64_t kept_decode_bytes(const ModelShape& shape);

}  // namespace pariskv::cuda
