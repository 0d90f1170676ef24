// The best rows of a choice, and the blocks of kept rows that they fill.
#include <algorithm>
#include <functional>

#include "cpu/kept/choice.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

/** A head's part of a block, row by row. */
class KeptWriter {
 public:
  KeptWriter(const ModelShape& shape, int64_t capacity, char* block, int64_t head)
      : shape_(shape), layout_(shape.kept(capacity)), block_(block), head_(head) {}

  void add(int32_t position, uint8_t age, const RowPlace& row) {
    layout_.positions(block_, head_)[filled_] = position;
    layout_.ages(block_, head_)[filled_] = age;
    copy_row(shape_.rows, row, kept_row(shape_, layout_, block_, head_, filled_++));
  }
  /** The rows so far are attended to, later ones held. */
  void end_of_attended() { attended_ = filled_; }
  void finish() {
    layout_.counts(block_, head_)[0] = int32_t(attended_);
    layout_.counts(block_, head_)[1] = int32_t(filled_ - attended_);
  }

 private:
  const ModelShape& shape_;
  const KeptLayout layout_;
  char* const block_;
  const int64_t head_;
  int64_t filled_ = 0, attended_ = 0;
};

}  // namespace

int64_t most_rows(const ObserveRules& rules, const KeptChange& change) {
  if (change.trims) return 0;
  const int64_t zone = change.after.zone_tokens();
  const PageFilter& filter = rules.filter;
  if (filter.wanted > 0) {
    const int64_t pages = filter.wanted * filter.page;
    return std::min(zone, pages + filter.latest + change.before.kept_capacity);
  }
  if (rules.fresh(change)) return zone;
  const int64_t added = change.after.zone_end - change.before.zone_end;
  return std::min(zone, change.before.kept_capacity + added);
}

int64_t choice_bytes(const ModelShape& shape, const ObserveRules& rules, const KeptChange* changes,
                     int64_t batch) {
  int64_t width = 0;
  for (int64_t i = 0; i < batch; ++i) width = std::max(width, most_rows(rules, changes[i]));
  Cutter measure(nullptr);
  Choice::cut(shape, rules, width, measure);
  return measure.bytes();
}

void take_best(const Choice& choice, int64_t head, int64_t keep, uint64_t share) {
  uint64_t* ranks = choice.ranks + head * choice.width;
  uint8_t* usable = choice.usable + head * choice.width;
  // The rank, then the lower row, in one number.
  constexpr int kRowBits = 23;
  constexpr uint64_t kRows = (uint64_t{1} << kRowBits) - 1;
  static_assert(uint64_t{kMostTokens} == kRows + 1);
  static_assert(kMostObservers <= int64_t{1} << (63 - kShareBits - kRowBits));
  const bool has_queries = choice.has_queries[head] != 0;
  int64_t candidates = 0;
  for (int64_t j = 0; j < choice.counts[head]; ++j) {
    if (usable[j] == 0) continue;
    ranks[candidates++] =
        has_queries ? ranks[j] / share << kRowBits | (kRows - uint64_t(j)) : uint64_t(j);
  }
  keep = std::min(keep, candidates);
  if (keep < candidates) {
    std::nth_element(ranks, ranks + keep, ranks + candidates, std::greater<uint64_t>());
  }
  for (int64_t i = 0; i < keep; ++i) {
    usable[has_queries ? kRows - (ranks[i] & kRows) : ranks[i]] = kChosen;
  }
}

void fill_kept(const ModelShape& shape, const KeptChange& change, const Choice& choice,
               int64_t head, int64_t patience) {
  const int32_t* positions = choice.positions + head * choice.width;
  const uint8_t* ages = choice.ages + head * choice.width;
  const uint8_t* usable = choice.usable + head * choice.width;
  KeptWriter writer(shape, change.after.kept_capacity, change.after[Part::kKept], head);
  const auto add = [&](int64_t j, uint8_t age) {
    writer.add(positions[j], age, row_to_choose(shape, change, choice, head, j));
  };
  for (int64_t j = 0; j < choice.counts[head]; ++j) {
    if (usable[j] == kChosen) add(j, 0);
  }
  writer.end_of_attended();
  for (int64_t j = 0; j < choice.counts[head]; ++j) {
    const bool held = usable[j] == 1 && ages[j] != kNewcomer && ages[j] < patience;
    if (held) add(j, uint8_t(ages[j] + 1));
  }
  writer.finish();
}

void trim_kept(const ModelShape& shape, const KeptChange& change, int64_t head) {
  const KeptLayout before = shape.kept(change.before.kept_capacity);
  char* from = change.before[Part::kKept];
  const int32_t* counts = before.counts(from, head);
  KeptWriter writer(shape, change.after.kept_capacity, change.after[Part::kKept], head);
  for (int64_t i = 0; i < counts[0] + counts[1]; ++i) {
    if (i == counts[0]) writer.end_of_attended();
    const int32_t position = before.positions(from, head)[i];
    if (position >= change.after.zone_end) continue;
    writer.add(position, before.ages(from, head)[i], kept_row(shape, before, from, head, i));
  }
  if (counts[1] == 0) writer.end_of_attended();
  writer.finish();
}

std::vector<std::vector<int32_t>> kept_positions(const ModelShape& shape,
                                                 const SequenceView& sequence, bool held) {
  std::vector<std::vector<int32_t>> heads(static_cast<size_t>(shape.kv_heads));
  if (sequence[Part::kKept] == nullptr) return heads;
  const KeptLayout layout = shape.kept(sequence.kept_capacity);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    const int32_t* counts = layout.counts(sequence[Part::kKept], head);
    const int32_t* first = layout.positions(sequence[Part::kKept], head) + (held ? counts[0] : 0);
    heads[size_t(head)].assign(first, first + counts[held ? 1 : 0]);
  }
  return heads;
}

}  // namespace pariskv::cpu
