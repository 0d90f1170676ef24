/** A step over kept rows, HARD-KV's and half of PRKV's, as the host asks for it. Launchers are in
 * launch.cu. */
#pragma once

#include <cuda_runtime_api.h>

#include "kept/slots.h"

namespace pariskv::cuda {

/** Attention to resident and kept rows. */
struct KeptDecodeCall : StepCall {
  const KeptSlot* slots;  // (batch), in device memory
};
void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream);
/** Of the scratch of a slot, for each kv head. */
int64_t kept_decode_bytes(const ModelShape& shape);

}  // namespace pariskv::cuda
