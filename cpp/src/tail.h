/**
 * Rows that stand for all that a step does not select: evenly spaced ones of the zone, each with
 * the weight of the keys that it is one of. Which rows follows from the zone alone, so forks,
 * chunks, truncation and replays agree.
 *
 * On the CPU and on a GPU with rows in host memory, copies of them lie side by side in a block per
 * layer and sequence of (heads, capacity) rows. A block with rows that count is not written to
 * again: where other rows are due, another block takes its place.
 */
#pragma once

#include <cstdint>

namespace pariskv {

struct Tail {
  int64_t bits;   // the rows are at multiples of 1 << bits
  int64_t first;  // the first one at this multiple
  int64_t count;  // 0: there are none

  /** Rows of a block of kept rows, where a zone has `rows` to twice as many. */
  static constexpr int64_t capacity(int64_t rows) { return 2 * rows; }

  /** Of the zone [begin, end): a spacing that leaves at most capacity(rows) of them. */
  static constexpr Tail of(int64_t begin, int64_t end, int64_t rows) {
    Tail tail{0, begin, 0};
    if (rows == 0 || begin >= end) return tail;
    for (;; ++tail.bits) {
      const int64_t last = (int64_t{1} << tail.bits) - 1;
      tail.first = (begin + last) >> tail.bits;
      tail.count = tail.count_to(end);
      if (tail.count <= capacity(rows)) return tail;
    }
  }

  /** The same beside so many selected rows: none where these are all of the zone. */
  static constexpr Tail beside(int64_t selected, int64_t begin, int64_t end, int64_t rows) {
    return of(begin, end, selected < end - begin ? rows : 0);
  }

  /** Whether one has the rows of the other, up to where it ends. */
  constexpr bool shares_rows(const Tail& other) const {
    return bits == other.bits && first == other.first;
  }
  /** Of these rows, those of a zone that ends here. */
  constexpr int64_t count_to(int64_t end) const {
    const int64_t multiples = (end + (int64_t{1} << bits) - 1) >> bits;
    return multiples > first ? multiples - first : 0;
  }
  constexpr int64_t position(int64_t i) const { return (first + i) << bits; }
  constexpr bool has(int64_t position) const {
    return count > 0 && (position & ((int64_t{1} << bits) - 1)) == 0;
  }
  /** Of a position that it has. */
  constexpr int number(int64_t position) const { return int((position >> bits) - first); }
  /** How many keys of so large a zone each stands for. */
  constexpr float weight(int64_t zone) const { return float(zone) / float(count); }
};

}  // namespace pariskv
