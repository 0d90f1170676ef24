/**
 * The scratch of a step over pages: of each kv head of a slot one after the other.
 *
 * | member | shape per kv head | from | to |
 * | --- | --- | --- | --- |
 * | `kept` | as a step over kept rows has it | attend_kept | merge_pages |
 * | `fetched` | (kParts, group, 2 + value_dim) | attend_pages | merge_pages |
 * | `search` | | score_pages, attend_pages | attend_pages, merge_pages, `explain` |
 * | `scores`, `live` | (capacity) | score_pages | attend_pages, `explain` |
 * | `found` | (the most pages that are found) | attend_pages | attend_pages, `explain` |
 * | `rows` | (their rows) | attend_pages | attend_pages |
 */
#pragma once

#include <cstdint>

#include "policy/prkv/rules.h"

namespace pariskv {
struct ModelShape;
}

namespace pariskv::cuda {

namespace device {
struct SelectedRow;
}  // namespace device

/** Blocks that score the pages of one head, at most. */
constexpr int kMostPageBlocks = 64;

/** What is known of a head's search. */
struct PageSearch {
  int32_t asking;                 // queries of the group that have a say
  int32_t found;                  // pages
  int32_t live[kMostPageBlocks];  // pages with live rows that a block has scored
};

/** A page that was found, counted from the zone's first one. */
struct FoundPage {
  uint64_t live;  // its rows
  int64_t page;
};

/** The arrays of one kv head. */
struct PageScratch {
  float* kept;     // see kept_decode_bytes
  float* fetched;  // maximum, sum, weighted
  PageSearch* search;
  float* scores;  // sums over the group; minus infinity: no page
  uint64_t* live;
  FoundPage* found;  // ascending
  device::SelectedRow* rows;
};

/** Where they lie. Capacities are multiples of 64. */
struct PageScratchLayout {
  int64_t fetched, search, scores;  // bytes from the begin of a head's
  int64_t page;                     // rows
  int64_t most_pages;               // that are found

  static PageScratchLayout of(const ModelShape& shape, const PRKVRules& rules);

  static constexpr int64_t kRowBytes = 16;
  constexpr int64_t found_of(int64_t capacity) const {
    return most_pages < capacity ? most_pages : capacity;
  }
  constexpr int64_t live(int64_t capacity) const { return scores + 4 * capacity; }
  constexpr int64_t found(int64_t capacity) const { return live(capacity) + 8 * capacity; }
  constexpr int64_t rows(int64_t capacity) const {
    return found(capacity) + int64_t(sizeof(FoundPage)) * found_of(capacity);
  }
  constexpr int64_t bytes(int64_t capacity) const {
    return (rows(capacity) + found_of(capacity) * page * kRowBytes + 255) / 256 * 256;
  }
};

}  // namespace pariskv::cuda
