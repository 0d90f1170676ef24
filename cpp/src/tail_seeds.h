/**
 * By what the rows of each sequence's tail are drawn. With a seed that a program names, every
 * sequence has the same; without one each has its own, which follows from a key that the system
 * draws once for a cache. SipHash between them: a sequence's seed tells nothing of the key, and so
 * of no other sequence.
 */
#pragma once

#include <cstdint>
#include <optional>

namespace pariskv {

/** 128 bits. */
struct SipKey {
  uint64_t low, high;
};

/** SipHash-2-4 of a number, as its eight bytes, by its public specification. */
uint64_t sip_hash(const SipKey& key, uint64_t number);

/** From the system's source of randomness; throws std::system_error where it has none. */
SipKey drawn_key();

class TailSeeds {
 public:
  /** @param shared  of every sequence; none: each has its own */
  explicit TailSeeds(const std::optional<uint32_t>& shared) : shared_(shared) {
    if (!shared) key_ = drawn_key();
  }

  /** Of one more sequence. */
  uint32_t next() { return shared_ ? *shared_ : uint32_t(sip_hash(key_, number_++) >> 32); }

 private:
  const std::optional<uint32_t> shared_;
  SipKey key_{};
  uint64_t number_ = 0;
};

}  // namespace pariskv
