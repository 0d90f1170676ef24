/** Choices of kept rows become launches: which are made side by side, and from what. */
#pragma once

#include <algorithm>

#include "kept/calls.h"

namespace pariskv::cuda {

/** Scratch of choices that are made side by side, unless a single kv head needs more. */
constexpr int64_t kChoiceBytes = int64_t{64} << 20;

/** Rows that a choice is made from, at most, per kv head. */
inline int64_t most_rows(const KeptChange& change) {
  const int64_t zone = change.after.zone_tokens();
  if (change.fresh()) return zone;
  const int64_t added = change.after.zone_end - change.before.zone_end;
  return std::min(zone, change.before.kept_capacity + added);
}

inline ChoiceJob job_of(const KeptChange& change) {
  const bool fresh = change.fresh();
  return {change.after.device,
          fresh ? nullptr : change.before[Part::kKept],
          change.after[Part::kKept],
          change.after[Part::kRecent],
          change.before.kept_capacity,
          change.after.kept_capacity,
          fresh ? change.after.zone_begin : change.before.zone_end,
          change.after.zone_end,
          change.queries,
          nullptr};
}

inline TrimCall trim_of(const ModelShape& shape, const KeptChange& change) {
  return {shape,
          change.before[Part::kKept],
          change.after[Part::kKept],
          change.before.kept_capacity,
          change.after.kept_capacity,
          change.after.zone_end};
}

/** Choices of one launch: their scratch is cut alike. */
struct SideBySide {
  ChoiceCall call;  // of all kv heads; `rules` and `space` are still to be set
  int64_t head_bytes;
  const KeptChange* changes[kMostChoices];
};

/**
 * Calls `visit(side)` for one launch of choices after the other.
 * @param most     bytes of scratch of a launch, unless a single choice needs more
 * @param scratch  scratch(change, side) sets call.scratch and head_bytes, all that a kv head needs
 */
template <typename Scratch, typename Visit>
void side_by_side(const ModelShape& shape, const KeptChange* changes, int64_t batch, int64_t most,
                  Scratch scratch, Visit visit) {
  for (int64_t i = 0; i < batch;) {
    SideBySide side{};
    ChoiceCall& call = side.call;
    call.shape = shape;
    call.heads = shape.kv_heads;
    for (; i < batch && call.count < kMostChoices; ++i) {
      if (changes[i].trims) continue;
      SideBySide own{};
      scratch(changes[i], own);
      const ChoiceScratch& cut = own.call.scratch;
      if (call.count == 0) {
        call.scratch = cut, side.head_bytes = own.head_bytes;
      } else if (cut.bytes != call.scratch.bytes || cut.width != call.scratch.width ||
                 own.head_bytes != side.head_bytes ||
                 (call.count + 1) * call.heads * side.head_bytes > most) {
        break;
      }
      side.changes[call.count] = &changes[i];
      call.jobs[call.count++] = job_of(changes[i]);
    }
    if (call.count == 0) return;
    visit(side);
  }
}

}  // namespace pariskv::cuda
