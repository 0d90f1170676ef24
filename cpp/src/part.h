/**
 * The parts of a layer of a sequence: blocks of one size that a search has beside rows and
 * summaries. parts.h says how each of them lives.
 */
#pragma once

#include <cstdint>

namespace pariskv {

enum class Part {
  kState,       // a policy's knowledge of a zone and of a prompt's queries
  kRowCache,    // fetched rows on a GPU, see gpu/row_cache.h
  kTailCopies,  // rows of the tail side by side, see tail_copies.h
  kKept,        // rows that were chosen to be kept, see kept.h
  kRecent,      // the last queries, see recent.h
};

constexpr int kPartCount = 5;
constexpr Part kAllParts[kPartCount] = {Part::kState, Part::kRowCache, Part::kTailCopies,
                                        Part::kKept, Part::kRecent};

}  // namespace pariskv
