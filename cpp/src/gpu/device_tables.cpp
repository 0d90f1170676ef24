#include "gpu/device_tables.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace pariskv {

namespace {

constexpr int64_t kFirstCapacity = 16;
constexpr size_t kViewWords = sizeof(SequenceView) / sizeof(uint64_t);

template <typename Pointer>
uint64_t word_of(Pointer pointer) {
  return uint64_t(reinterpret_cast<uintptr_t>(pointer));
}

}  // namespace

int64_t DeviceTables::bytes_of(int64_t segments, bool narrows) {
  int64_t capacity = kFirstCapacity;
  while (capacity < segments) capacity *= 2;
  return (narrows ? 3 : 2) * capacity * int64_t(sizeof(uint64_t));
}

Block DeviceTables::grown(int64_t segments, Arena& arena) const {
  if (device_ == nullptr || segments <= capacity_) return Block();
  return arena.allocate(bytes_of(segments, narrows()));
}

void DeviceTables::send(void* target, uint64_t& sent, uint64_t value, WordUpdates& updates) {
  if (known_ && sent == value) return;
  updates.update_word(target, value);
  sent = value;
}

void DeviceTables::publish(const SequenceView& view, int64_t segments, int64_t narrow_segments,
                           const Positions& freed, Block& tables, WordUpdates* updates) {
  if (device_ == nullptr) return;
  if (tables.data() != nullptr) {
    tables_ = std::move(tables);
    capacity_ = tables_.bytes() / (tables_per_segment_ * int64_t(sizeof(uint64_t)));
    known_ = false;
  }
  words_.resize(kViewWords);
  entries_.resize(size_t(tables_per_segment_ * capacity_));
  auto* entries = tables_.as<uint64_t>();
  const auto send_entry = [&](int64_t table, int64_t segment, uint64_t value) {
    const int64_t at = table * capacity_ + segment;
    send(entries + at, entries_[size_t(at)], value, *updates);
  };
  for (int64_t s = 0; s < segments; ++s) {
    send_entry(0, s, s >= freed.begin && s < freed.end ? 0 : word_of(view.rows[s]));
    send_entry(1, s, word_of(view.summaries[s]));
    // What is not there yet is sent as null: after another table, words are not known.
    if (narrows()) send_entry(2, s, s < narrow_segments ? word_of(view.narrow_rows[s]) : 0);
  }
  SequenceView there = view;
  there.rows = reinterpret_cast<void* const*>(entries);
  there.summaries = reinterpret_cast<uint8_t* const*>(entries + capacity_);
  if (narrows()) there.narrow_rows = reinterpret_cast<void* const*>(entries + 2 * capacity_);
  there.device = device_;
  uint64_t words[kViewWords];
  std::memcpy(words, &there, sizeof there);
  auto* target = reinterpret_cast<uint64_t*>(device_);
  for (size_t i = 0; i < kViewWords; ++i) send(target + i, words_[i], words[i], *updates);
  known_ = true;
}

void DeviceTables::note_total(int64_t total) noexcept {
  if (!words_.empty()) words_[offsetof(SequenceView, total) / sizeof(uint64_t)] = uint64_t(total);
}

void DeviceTables::publish_row(int64_t segment, void* rows, WordUpdates* updates) {
  if (device_ == nullptr || !known_ || segment >= capacity_) return;
  const int64_t at = (narrows() ? 2 * capacity_ : 0) + segment;
  send(tables_.as<uint64_t>() + at, entries_[size_t(at)], word_of(rows), *updates);
}

}  // namespace pariskv
