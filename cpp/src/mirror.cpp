#include "mirror.h"

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

Block Mirror::grown(int64_t segments, Arena& arena) const {
  if (device_ == nullptr || segments <= capacity_) return Block();
  int64_t capacity = std::max(capacity_, kFirstCapacity);
  while (capacity < segments) capacity *= 2;
  return arena.allocate(2 * capacity * int64_t(sizeof(uint64_t)));
}

void Mirror::tell(void* target, uint64_t& told, uint64_t value, Backend& backend) {
  if (known_ && told == value) return;
  backend.poke(target, value);
  told = value;
}

void Mirror::publish(const SequenceView& view, int64_t segments, Block& tables, Backend& backend) {
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
    tell(entries + s, entries_[size_t(s)], word_of(view.rows[s]), backend);
    tell(entries + t, entries_[size_t(t)], word_of(view.summaries[s]), backend);
  }
  SequenceView there = view;
  there.rows = reinterpret_cast<void* const*>(entries);
  there.summaries = reinterpret_cast<uint8_t* const*>(entries + capacity_);
  there.device = device_;
  uint64_t words[kViewWords];
  std::memcpy(words, &there, sizeof there);
  auto* target = reinterpret_cast<uint64_t*>(device_);
  for (size_t i = 0; i < kViewWords; ++i) tell(target + i, words_[i], words[i], backend);
  known_ = true;
}

void Mirror::publish_row(int64_t segment, void* rows, Backend& backend) {
  if (device_ == nullptr || !known_ || segment >= capacity_) return;
  tell(tables_.as<uint64_t>() + segment, entries_[size_t(segment)], word_of(rows), backend);
}

}  // namespace pariskv
