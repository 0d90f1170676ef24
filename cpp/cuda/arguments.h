/** Arguments that launches of several verbs have. */
#pragma once

#include <cstdint>

#include "pariskv/sizes.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cuda {

/** Constants of the codec, small enough to travel with every launch. */
struct CodecConstants {
  SummaryLayout layout;
  uint32_t negative[kMaxRotatedDim / 32];  // bit d % 32 of word d / 32: rotation sign d is -1
  float thresholds[7];
  float centres[8];
};

/** A rank-3 tensor (i, j, d): innermost elements side by side. */
struct Rows {
  char* data;                  // null: not there
  int64_t stride_i, stride_j;  // in elements
};

}  // namespace pariskv::cuda
