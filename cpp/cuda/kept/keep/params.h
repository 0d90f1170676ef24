/** What the kernels of a choice of kept rows are launched with. */
#pragma once

#include "device/divisor.cuh"
#include "kept/calls.h"

namespace pariskv::cuda {

struct ChoiceParams {
  ChoiceCall call;
  device::SegmentDivisor by_segment;  // divides by the tokens of a segment
  device::IndexDivisor by_heads;      // divides by the kv heads of the launch
};

}  // namespace pariskv::cuda
