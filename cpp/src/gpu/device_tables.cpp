#include "gpu/device_tables.h"

#include <algorithm>
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

Block DeviceTables::grown(int64_t segments, Arena& arena) const {
  if (device_ == nullptr || segments <= capacity_) return Block();
  int64_t capacity = std::max(capacity_, kFirstCapacity);
  while (capacity < segments) capacity *= 2;
  return arena.allocate(2 * capacity * int64_t(sizeof(uint64_t)));
}

void DeviceTables::send(void* target, uint64_t& sent, uint64_t value, WordUpdates& updates) {
  if (known_ && sent == value) return;
  updates.update_word(target, value);
  sent = value;
}

void DeviceTables::publish(const SequenceView& view, int64_t segments, Block& tables,
                           WordUpdates* updates) {
  if (device_ == nullptr) return;
  if (tables.data() != nullptr) {
    tables_ = std::move(tables);
    capacity_ = tables_.bytes() / int64_t(2 * sizeof(uint64_t));
    known_ = false;
  }
  words_.resize(kViewWords);
  entries_.resize(size_t(2 * capacity_));
  auto* entries = tables_.as<uint64_t>();
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t t = capacity_ + s;
    send(entries + s, entries_[size_t(s)], word_of(view.rows[s]), *updates);
    send(entries + t, entries_[size_t(t)], word_of(view.summaries[s]), *updates);
  }
  SequenceView there = view;
  there.rows = reinterpret_cast<void* const*>(entries);
  there.summaries = reinterpret_cast<uint8_t* const*>(entries + capacity_);
  there.device = device_;
  uint64_t words[kViewWords];
  std::memcpy(words, &there, sizeof there);
  auto* target = reinterpret_cast<uint64_t*>(device_);
  for (size_t i = 0; i < kViewWords; ++i) send(target + i, words_[i], words[i], *updates);
  known_ = true;
}

void DeviceTables::publish_row(int64_t segment, void* rows, WordUpdates* updates) {
  if (device_ == nullptr || !known_ || segment >= capacity_) return;
  send(tables_.as<uint64_t>() + segment, entries_[size_t(segment)], word_of(rows), *updates);
}

}  // namespace pariskv
