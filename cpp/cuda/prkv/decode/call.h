/** PRKV's decode step, as the host asks for it. Launchers are in launch.cu. */
#pragma once

#include "kept/decode/call.h"
#include "policy/prkv/rules.h"
#include "prkv/decode/scratch.h"

namespace pariskv::cuda {

/** A step: attention to resident and kept rows, and to the live rows of the best pages. */
struct PageDecodeCall : KeptDecodeCall {
  PRKVRules rules;
  bool explains;      // pages are found, and that is all
  int64_t* counters;  // DecodeCounts; not where a step is explained
};
void launch_page_decode(const PageDecodeCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
