/** How many scores are at least b: what the blocks that score leave for the threshold. */
#pragma once

#include <cstdint>

#include "device/partition.cuh"

namespace pariskv::cuda::device {

constexpr int kFine = 16;  // bins of scores that are looked at together

/** What a block that scores leaves: how many scores are at least b, for every b. */
struct ScoreCounts {
  int32_t at_least[256];
  int32_t coarse[kFine];          // every 16th of these
  int32_t of_warps[kWarps][256];  // the same of each warp, whose keys lie side by side
};

}  // namespace pariskv::cuda::device
