#include "ledger.h"

#include <algorithm>
#include <utility>

namespace pariskv::ggml {

namespace {

/** Sequences that no step named stay so long as there are fewer than this. */
constexpr size_t kMostSlots = 16;
/**
 * Reading a sequence takes as long as some 16 steps save by having it read: so many steps pay for
 * it. A prompt's first reading counts for nothing beside the prompt. Where more than this many
 * readings of the same cells are not paid for, steps are the host's for a while.
 */
constexpr double kPaidByStep = 1. / 16, kMostDebt = 3;
/** What is owed after a rest: of a sequence that changes as before, two readings begin another. */
constexpr double kDebtAfterRest = 2;
constexpr int64_t kFirstRest = 64, kLongestRest = 4096;

}  // namespace

void Ledger::write(int64_t cell) {
  if (stamps_[size_t(cell)] == pass_) return;
  stamps_[size_t(cell)] = pass_;
  written_.add(cell);
  read_.remove(cell);
}

void Ledger::forget() {
  slots_.clear();
  written_.clear();
}

int64_t Ledger::begin_rest() {
  next_rest_ = std::min(std::max(2 * next_rest_, kFirstRest), kLongestRest);
  rest_until_ = int64_t(pass_) + next_rest_;
  debt_ = kDebtAfterRest;
  return next_rest_;
}

bool Ledger::is_overwritten(const Slot& slot, int64_t token) const {
  return stamps_[size_t(slot.cells[size_t(token)])] != slot.stamps[size_t(token)];
}

int64_t Ledger::intact(const Slot& slot, const Bits& visible) const {
  const int64_t tokens = int64_t(slot.cells.size());
  if (!slot.damaged && slot.bits.count_without(visible) == 0) return tokens;
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t cell = slot.cells[size_t(i)];
    if (!visible.has(cell) || is_overwritten(slot, i)) return i;
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
    // The rest of the best one may be another sequence's: that one stays, and this is a fork. But
    // a rest that begins with a cell of other numbers is nobody's. What this plan appended is not
    // in the layers yet.
    const int64_t shared = best < 0 ? 0 : std::min(keep, slots_[size_t(best)].base);
    if (shared < least_shared_) {
      index = new_slot(plan, {Change::Kind::kAdd, -1});
    } else if (is_overwritten(slots_[size_t(best)], keep)) {
      truncate(best, shared);
      plan.changes.push_back({Change::Kind::kTruncate, best, -1, shared});
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
    again_ += read_.has(slot.cells[i]);
    read_.add(slot.cells[i]);
  }
  return {index, int64_t(slot.cells.size())};
}

bool Ledger::is_in_another(size_t index) const {
  const Slot& slot = slots_[index];
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& other = slots_[i];
    if (i == index || !other.used || other.cells.size() < slot.cells.size()) continue;
    if (std::equal(slot.cells.begin(), slot.cells.end(), other.cells.begin()) &&
        std::equal(slot.stamps.begin(), slot.stamps.end(), other.stamps.begin())) {
      return true;
    }
  }
  return false;
}

void Ledger::remove(size_t index, Plan& plan) {
  slots_[index] = Slot();
  plan.changes.push_back({Change::Kind::kRemove, int64_t(index)});
}

void Ledger::drop_overwritten(Plan& plan) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.used || !slot.damaged) continue;  // one that a token sees is whole
    // Its own cells are all visible to it: what counts is whether they were written.
    const int64_t left = intact(slot, slot.bits);
    slot.damaged = false;
    if (left == int64_t(slot.cells.size())) continue;
    truncate(int64_t(i), left);
    if (left < least_shared_ || is_in_another(i)) {
      remove(i, plan);
    } else {
      plan.changes.push_back({Change::Kind::kTruncate, int64_t(i), -1, left});
    }
  }
}

void Ledger::drop_oldest(Plan& plan) {
  const auto is_used = [](const Slot& slot) { return slot.used; };
  auto used = size_t(std::count_if(slots_.begin(), slots_.end(), is_used));
  for (; used > kMostSlots; --used) {
    size_t oldest = slots_.size();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].used || slots_[i].last_plan == plans_) continue;
      if (oldest == slots_.size() || slots_[i].last_plan < slots_[oldest].last_plan) oldest = i;
    }
    if (oldest == slots_.size()) return;  // all are in use
    remove(oldest, plan);
  }
}

void Ledger::weigh_reading(Plan& plan, const std::vector<int64_t>& before) {
  int64_t seen = 0;
  for (const Seen& row : plan.rows) seen += row.tokens;
  debt_ = std::max(0., debt_ - kPaidByStep) + double(again_) / double(seen);
  if (debt_ == 0) next_rest_ = 0;
  if (debt_ <= kMostDebt) return;
  // Nothing of this plan is carried out, but that what was there is gone.
  plan = {};
  plan.serves = false;
  plan.rest = begin_rest();
  for (const int64_t slot : before) plan.changes.push_back({Change::Kind::kRemove, slot});
  slots_.clear();
}

Plan Ledger::plan(const std::vector<Bits>& visible) {
  Plan plan;
  ++plans_;
  std::vector<int64_t> before;  // slots
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.used) continue;
    before.push_back(int64_t(i));
    slot.base = int64_t(slot.cells.size());
    slot.damaged = slot.damaged || slot.bits.intersects(written_);
  }
  written_.clear();
  if (rests()) {
    plan.serves = false;
    return plan;
  }
  again_ = 0;
  for (const Bits& row : visible) plan.rows.push_back(place(row, plan));
  drop_overwritten(plan);
  drop_oldest(plan);
  weigh_reading(plan, before);
  return plan;
}

}  // namespace pariskv::ggml
