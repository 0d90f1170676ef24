/** Parameters of the kernels of digests and choices. */
#pragma once

#include "device/divisor.cuh"
#include "kept/keep/params.h"
#include "prkv/calls.h"

namespace pariskv::cuda {

struct DigestParams {
  DigestCall call;
  device::SegmentDivisor by_segment;  // divides by the tokens of a segment
};

/** Of a choice, or of some kv heads of it. */
struct PRKVChoiceParams {
  ChoiceParams choice;
  PRKVRules rules;
  bool compares;
  bool copied;  // keys of the rows that are looked at are in scratch
  LookScratch look;
  char* look_space;  // of the first head
  const PRKVSplit* before[kMostChoices];
  int64_t wanted[kMostChoices];
};

}  // namespace pariskv::cuda
