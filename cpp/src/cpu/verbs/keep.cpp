// HARD-KV's choice of the rows that are kept, and their copies.
#include <algorithm>
#include <cstring>

#include "cpu/choice.h"
#include "cpu/hardkv_step.h"
#include "cpu/rows.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

/** Rows that a choice is made from, at most, per kv head. */
int64_t most_rows(const KeptChange& change) {
  const int64_t zone = change.after.zone_tokens();
  if (change.cut() || change.fresh()) return change.cut() ? 0 : zone;
  const int64_t added = change.after.zone_end - change.before.zone_end;
  return std::min(zone, change.before.kept_capacity + added);
}

/** The chosen rows, then those that lost too few choices to be forgotten. */
void fill(const HardKvKeep& args, const KeptChange& change, const Choice& choice, int64_t head,
          uint8_t chosen) {
  const KeptLayout after = args.shape.kept(change.after.kept_capacity);
  const uint8_t* usable = choice.usable + head * choice.width;
  char* block = change.after.kept;
  const int32_t* positions = choice.positions + head * choice.width;
  const uint8_t* ages = choice.ages + head * choice.width;
  int64_t filled = 0;
  const auto add = [&](int64_t j, uint8_t age) {
    after.positions(block, head)[filled] = positions[j];
    after.ages(block, head)[filled] = age;
    std::memcpy(after.row(block, head, filled++),
                row_at(args.shape, change.after, head, positions[j]), size_t(after.row_bytes));
  };
  for (int64_t j = 0; j < choice.counts[head]; ++j) {
    if (usable[j] == chosen) add(j, 0);
  }
  after.counts(block, head)[0] = int32_t(filled);
  for (int64_t j = 0; j < choice.counts[head]; ++j) {
    const bool held = usable[j] == 1 && ages[j] != kNewcomer && ages[j] < args.rules.patience;
    if (held) add(j, uint8_t(ages[j] + 1));
  }
  after.counts(block, head)[1] = int32_t(filled) - after.counts(block, head)[0];
}

/** How many rows a head keeps, which ones, and their copies. */
void choose(const HardKvKeep& args, const KeptChange& change, const Choice& choice, int64_t head) {
  const int64_t count = choice.counts[head];
  uint64_t* shares = choice.shares + head * choice.width;
  uint64_t* ranks = choice.ranks + head * choice.width;
  uint8_t* usable = choice.usable + head * choice.width;
  // The rank, then the lower row, in one number; without a say the latest rows are kept.
  constexpr int kRowBits = 23;
  constexpr uint64_t kRows = (uint64_t{1} << kRowBits) - 1;
  static_assert(uint64_t{kMostTokens} == kRows + 1);
  static_assert(kMostObservers <= int64_t{1} << (63 - kShareBits - kRowBits));
  const bool heard = choice.heard[head] != 0;
  int64_t candidates = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (usable[j] == 0) continue;
    ranks[candidates++] = heard ? ranks[j] << kRowBits | (kRows - uint64_t(j)) : uint64_t(j);
  }
  int64_t keep = args.rules.most;
  if (heard && args.rules.p != 1 << kTopPBits) {
    keep = top_p_count(shares, count, args.rules.p, args.rules.most);
  }
  keep = std::min(std::max(keep, args.rules.least), candidates);
  if (keep < candidates) {
    std::nth_element(ranks, ranks + keep, ranks + candidates, std::greater<uint64_t>());
  }
  constexpr uint8_t kChosen = 2;
  for (int64_t i = 0; i < keep; ++i) {
    usable[heard ? kRows - (ranks[i] & kRows) : ranks[i]] = kChosen;
  }
  fill(args, change, choice, head, kChosen);
}

/** What is left of a head's rows in a zone that was cut. */
void trim(const ModelShape& shape, const KeptChange& change, int64_t head) {
  const KeptLayout before = shape.kept(change.before.kept_capacity);
  const KeptLayout after = shape.kept(change.after.kept_capacity);
  char *from = change.before.kept, *to = change.after.kept;
  const int32_t* counts = before.counts(from, head);
  int64_t filled = 0;
  int32_t* left = after.counts(to, head);
  left[0] = left[1] = 0;
  for (int64_t i = 0; i < counts[0] + counts[1]; ++i) {
    const int32_t position = before.positions(from, head)[i];
    if (position >= change.after.zone_end) continue;
    after.positions(to, head)[filled] = position;
    after.ages(to, head)[filled] = before.ages(from, head)[i];
    std::memcpy(after.row(to, head, filled++), before.row(from, head, i), size_t(after.row_bytes));
    ++left[i < counts[0] ? 0 : 1];
  }
}

}  // namespace

int64_t HardKvStep::scratch_bytes(const HardKvKeep& args) const {
  int64_t width = 0;
  for (int64_t i = 0; i < args.batch; ++i) width = std::max(width, most_rows(args.changes[i]));
  Cutter measure(nullptr);
  Choice::cut(args.shape, width, measure);
  return measure.bytes();
}

void HardKvStep::keep_up(const HardKvKeep& args) {
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (change.cut()) {
      pool_.parallel_for(args.shape.kv_heads,
                         [&](int64_t head) { trim(args.shape, change, head); });
      continue;
    }
    Cutter cutter(scratch_.as<char>());
    const Choice choice = Choice::cut(args.shape, most_rows(change), cutter);
    observe(kernels_, pool_, args, change, choice);
    pool_.parallel_for(args.shape.kv_heads,
                       [&](int64_t head) { choose(args, change, choice, head); });
  }
}

void HardKvStep::search(const DecodeArgs& args, const HardKvRules&, const Running& running) {
  std::fill_n(running.selection.count, args.batch * args.shape.kv_heads, 0);
}

Trace HardKvStep::trace(const DecodeArgs& args, const HardKvRules&) const {
  const SequenceView& sequence = args.sequences[0];
  const KeptLayout layout = args.shape.kept(sequence.kept_capacity);
  HardKvTrace trace;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int32_t* counts = layout.counts(sequence.kept, head);
    const int32_t* positions = layout.positions(sequence.kept, head);
    trace.kept.emplace_back(positions, positions + counts[0]);
    trace.held.emplace_back(positions + counts[0], positions + counts[0] + counts[1]);
  }
  return trace;
}

}  // namespace pariskv::cpu
