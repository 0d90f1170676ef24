/**
 * The constants that summaries are made with, for programs that check or decode
 * them. Both are derived, and equal on every machine and backend.
 */
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pariskv/export.h"

namespace pariskv {

/** The dimension that keys are rotated in: the smallest power of two that holds `head_dim`. */
PARISKV_API int64_t rotated_dim_of(int64_t head_dim);

/**
 * The signs s of the rotation H diag(s) / sqrt(rotated_dim), +1 or -1. They come from a
 * counter-based generator: sign i is the top bit of the SplitMix64 finaliser of
 * seed + (i + 1) * 0x9e3779b97f4a7c15, set meaning -1.
 */
PARISKV_API std::vector<float> rotation_signs(int64_t rotated_dim, uint64_t seed);

/**
 * The magnitude levels of the 4-bit code: the Lloyd-Max quantiser with 8 levels for |u_j|,
 * u uniform on the unit sphere in 8 dimensions (so u_j^2 is Beta(1/2, 7/2) distributed).
 */
struct MagnitudeLevels {
  std::array<double, 7> thresholds;  ///< Level l holds [thresholds[l-1], thresholds[l]).
  std::array<double, 8> centres;     ///< The value of level l.
};

/** Computed on first use. */
PARISKV_API const MagnitudeLevels& magnitude_levels();

}  // namespace pariskv
