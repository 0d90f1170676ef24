#include "ledger.h"

#include <algorithm>
#include <utility>

namespace pariskv::ggml {

namespace {

/** Sequences that no step named stay so long as there are fewer than this. */
constexpr size_t kMostSlots = 16;
/**
 * A cache whose visible cells change all the time, as a ring of a sliding window does, would be
 * read again for every token. So much of that, in caches' worth and fading by a 16th each plan, and
 * the host computes the next steps itself; each time twice as many.
 */
constexpr double kMostRebuilt = 3;
constexpr int64_t kFirstRest = 256, kLongestRest = 65536;

}  // namespace

void Ledger::write(int64_t cell) {
  if (stamps_[size_t(cell)] == pass_) return;
  stamps_[size_t(cell)] = pass_;
  written_.push_back(int32_t(cell));
}

void Ledger::forget() {
  slots_.clear();
  written_.clear();
}

int64_t Ledger::intact(const Slot& slot, const Bits& visible) const {
  const int64_t tokens = int64_t(slot.cells.size());
  if (!slot.damaged && slot.bits.count_without(visible) == 0) return tokens;
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t cell = slot.cells[size_t(i)];
    if (!visible.has(cell) || stamps_[size_t(cell)] != slot.stamps[size_t(i)]) return i;
  }
  return tokens;
}

void Ledger::truncate(int64_t index, int64_t keep) {
  Slot& slot = slots_[size_t(index)];
  for (size_t i = size_t(keep); i < slot.cells.size(); ++i) slot.bits.remove(slot.cells[i]);
  slot.cells.resize(size_t(keep)), slot.stamps.resize(size_t(keep));
  slot.base = std::min(slot.base, keep);
}

int64_t Ledger::new_slot(Plan& plan, const Change& change) {
  size_t index = 0;
  while (index < slots_.size() && slots_[index].used) ++index;
  if (index == slots_.size()) slots_.emplace_back();
  Slot& slot = slots_[index];
  if (change.kind == Change::Kind::kFork) {
    slot = slots_[size_t(change.source)];
  } else {
    slot = Slot();
    slot.bits = Bits(cells_);
  }
  slot.used = true;
  plan.changes.push_back({change.kind, int64_t(index), change.source});
  return int64_t(index);
}

Seen Ledger::place(const Bits& visible, Plan& plan) {
  int64_t best = -1, keep = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].used) continue;
    const int64_t same = intact(slots_[i], visible);
    if (same > keep) best = int64_t(i), keep = same;
  }
  int64_t index = best;
  if (best < 0 || keep < int64_t(slots_[size_t(best)].cells.size())) {
    // The rest of the best one may be another sequence's: that one stays, and this is a fork. What
    // this plan appended is not in the layers yet.
    const int64_t shared = best < 0 ? 0 : std::min(keep, slots_[size_t(best)].base);
    if (shared < least_shared_) {
      index = new_slot(plan, {Change::Kind::kAdd, -1});
    } else {
      index = new_slot(plan, {Change::Kind::kFork, -1, best});
      truncate(index, shared);
      plan.changes.push_back({Change::Kind::kTruncate, index, -1, shared});
    }
  }
  Slot& slot = slots_[size_t(index)];
  slot.damaged = false;  // all of it is intact
  slot.last_plan = plans_;
  const size_t had = slot.cells.size();
  visible.for_each_without(slot.bits, [&](int64_t cell) { slot.cells.push_back(int32_t(cell)); });
  std::sort(slot.cells.begin() + int64_t(had), slot.cells.end(), [&](int32_t a, int32_t b) {
    return std::make_pair(stamps_[size_t(a)], a) < std::make_pair(stamps_[size_t(b)], b);
  });
  for (size_t i = had; i < slot.cells.size(); ++i) {
    slot.bits.add(slot.cells[i]);
    slot.stamps.push_back(stamps_[size_t(slot.cells[i])]);
  }
  if (int64_t(slot.cells.size() - had) >= least_shared_) {
    rebuilt_ += double(slot.cells.size() - had) / double(cells_);
  }
  return {index, int64_t(slot.cells.size())};
}

void Ledger::drop_useless(Plan& plan) {
  const auto remove = [&](size_t i) {
    slots_[i] = Slot();
    plan.changes.push_back({Change::Kind::kRemove, int64_t(i)});
  };
  size_t used = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.used) continue;
    if (slot.damaged && slot.last_plan != plans_) {
      // Its own cells are all visible to it: what counts is whether they were written.
      const int64_t left = intact(slot, slot.bits);
      if (left < least_shared_) {
        remove(i);
        continue;
      }
    }
    ++used;
  }
  for (; used > kMostSlots; --used) {
    size_t oldest = slots_.size();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].used || slots_[i].last_plan == plans_) continue;
      if (oldest == slots_.size() || slots_[i].last_plan < slots_[oldest].last_plan) oldest = i;
    }
    if (oldest == slots_.size()) return;  // all are in use
    remove(oldest);
  }
}

Plan Ledger::plan(const std::vector<Bits>& visible) {
  Plan plan;
  ++plans_;
  rebuilt_ *= 15. / 16;
  for (Slot& slot : slots_) {
    if (!slot.used) continue;
    slot.base = int64_t(slot.cells.size());
    for (const int32_t cell : written_) {
      if (slot.damaged) break;
      slot.damaged = slot.bits.has(cell);
    }
  }
  written_.clear();
  if (rest_ > 0 && --rest_ > 0) {
    plan.serves = false;
    return plan;
  }
  for (const Bits& row : visible) plan.rows.push_back(place(row, plan));
  drop_useless(plan);
  if (rebuilt_ > kMostRebuilt * double(visible.size())) {
    rebuilt_ = 0;
    rest_ = next_rest_ = std::min(std::max(2 * next_rest_, kFirstRest), kLongestRest);
  }
  return plan;
}

}  // namespace pariskv::ggml
