/** Sets of cells of a KV cache, a bit for each. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pariskv::ggml {

class Bits {
 public:
  explicit Bits(int64_t size = 0) : words_(size_t(size + 63) / 64) {}

  bool has(int64_t i) const { return words_[size_t(i / 64)] >> (i % 64) & 1; }
  void add(int64_t i) { words_[size_t(i / 64)] |= uint64_t{1} << (i % 64); }
  void remove(int64_t i) { words_[size_t(i / 64)] &= ~(uint64_t{1} << (i % 64)); }
  void clear() { words_.assign(words_.size(), 0); }
  /** Bits [64 * word, 64 * word + 64). */
  void set_word(int64_t word, uint64_t bits) { words_[size_t(word)] = bits; }

  int64_t count() const {
    int64_t sum = 0;
    for (const uint64_t word : words_) sum += __builtin_popcountll(word);
    return sum;
  }
  bool intersects(const Bits& other) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      if ((words_[w] & other.words_[w]) != 0) return true;
    }
    return false;
  }
  /** How many are here and not there. */
  int64_t count_without(const Bits& other) const {
    int64_t sum = 0;
    for (size_t w = 0; w < words_.size(); ++w) {
      sum += __builtin_popcountll(words_[w] & ~other.words_[w]);
    }
    return sum;
  }

  /** Calls `visit(i)` for those that are here and not there, in order. */
  template <typename Visit>
  void for_each_without(const Bits& other, Visit visit) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t left = words_[w] & ~other.words_[w]; left != 0; left &= left - 1) {
        visit(int64_t(w) * 64 + __builtin_ctzll(left));
      }
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace pariskv::ggml
