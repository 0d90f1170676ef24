/**
 * The queries of the last positions of a layer of a sequence, for a policy that chooses rows by
 * what was asked for lately. The query of position p lies in slot p % slots with p beside it, so a
 * replayed step needs no pointer to know its slot, and a slot of a position that is gone does not
 * count. A block:
 *
 *   positions (slots) int64            position + 1; 0: the slot is empty
 *   scales    (slots, query_heads)     RecentScale
 *   numbers   (slots, query_heads, key_dim) int8
 */
#pragma once

#include <cmath>
#include <cstdint>

#include "octaves.h"

namespace pariskv {

/** How products with a remembered query become logits in steps; see octaves.h. */
struct RecentScale {
  float unit;    // steps_per_unit; NaN: the query is not finite and has no say
  int32_t most;  // steps of a logit at most: the soft cap; kMostSteps: none
};

struct RecentLayout {
  int64_t slots;
  int64_t query_heads;
  int64_t key_dim;

  constexpr int64_t scales_offset() const { return slots * 8; }
  constexpr int64_t numbers_offset() const { return scales_offset() + slots * query_heads * 8; }
  constexpr int64_t bytes() const { return numbers_offset() + slots * query_heads * key_dim; }

  int64_t slot_of(int64_t position) const { return position % slots; }
  int64_t* position(char* block, int64_t slot) const {
    return reinterpret_cast<int64_t*>(block) + slot;
  }
  RecentScale* scale(char* block, int64_t slot, int64_t query_head) const {
    return reinterpret_cast<RecentScale*>(block + scales_offset()) + slot * query_heads +
           query_head;
  }
  int8_t* numbers(char* block, int64_t slot, int64_t query_head) const {
    return reinterpret_cast<int8_t*>(block + numbers_offset()) +
           (slot * query_heads + query_head) * key_dim;
  }
};

static_assert(sizeof(RecentScale) == 8);

/** Rounds one head of a query, (key_dim) floats, to what is kept of it. */
inline void round_query(const float* query, int64_t key_dim, float scale, float softcap,
                        RecentScale* out, int8_t* numbers) {
  bool finite = true;
  for (int64_t d = 0; d < key_dim; ++d) finite = finite && std::isfinite(query[d]);
  if (!finite) {
    *out = {NAN, 0};
    for (int64_t d = 0; d < key_dim; ++d) numbers[d] = 0;
    return;
  }
  const float largest = largest_of(query, key_dim);
  *out = {steps_per_unit(scale, largest), most_steps(softcap)};
  quantise(query, key_dim, largest, kByteLevels, numbers);
}

}  // namespace pariskv
