/**
 * Rows that stand for all that a step does not select: one of each interval of the zone, each with
 * the weight of the keys that it is one of. Which rows follows from the zone and the sequence's
 * seed alone (tail_seeds.h), so forks, chunks, truncation and replays agree.
 *
 * An interval is 1 << bits positions, and its row is drawn like the winner of a tournament: it is
 * the row of the left or of the right half, as a coin says that belongs to these positions. So
 * every position of an interval is drawn as often over seeds, and with intervals of twice the
 * length every second row goes and no other one comes. A row has no fixed distance to the next one:
 * evenly spaced ones take the same column of every line where lines have as many tokens.
 *
 * Copies of them in 8 bits lie side by side in a block per layer and sequence (tail_copies.h): what
 * such a row adds is noise of a sample, beside which that of 8 bits is nothing, and twice as many
 * of them are a better sample. Rows that count are never overwritten: new ones go behind
 * them, and where other rows are due, another block takes its place. Borrowed rows are read where
 * they lie.
 */
#pragma once

#include <cstdint>

#include "split_mix.h"

namespace pariskv {

struct Tail {
  int64_t bits;   // an interval is 1 << bits positions
  int64_t first;  // the first interval whose row is in the zone
  int64_t count;  // 0: there are none
  uint32_t seed;

  /** Rows of a block of copies, where a zone has `rows` to twice as many. */
  static constexpr int64_t capacity(int64_t rows) { return 2 * rows; }

  /** Of a policy's seed: neighbours have nothing in common. */
  static constexpr uint32_t seed_of(uint64_t seed) { return uint32_t(split_mix(seed, 1) >> 32); }

  /** Of the zone [begin, end): intervals that leave at most capacity(rows) of them. */
  static constexpr Tail of(int64_t begin, int64_t end, int64_t rows, uint32_t seed) {
    Tail tail{0, begin, 0, seed};
    if (rows == 0 || begin >= end) return tail;
    // One less than this lie in the zone as a whole, and each of them has its row there.
    while (((end - begin) >> tail.bits) - 1 > capacity(rows)) ++tail.bits;
    for (;; ++tail.bits) {
      tail.first = tail.rows_before(begin);
      tail.count = tail.count_to(end);
      if (tail.count <= capacity(rows)) return tail;
    }
  }

  /** The same beside so many selected rows: none where these are all of the zone. */
  static constexpr Tail beside(int64_t selected, int64_t begin, int64_t end, int64_t rows,
                               uint32_t seed) {
    return of(begin, end, selected < end - begin ? rows : 0, seed);
  }

  /** Whether one has the rows of the other, up to where it ends. */
  constexpr bool shares_rows(const Tail& other) const {
    return bits == other.bits && first == other.first;
  }
  /** Of these rows, those of a zone that ends here. */
  constexpr int64_t count_to(int64_t end) const {
    const int64_t rows = rows_before(end);
    return rows > first ? rows - first : 0;
  }
  constexpr int64_t position(int64_t i) const { return row_of(first + i); }
  /** Whether it has a position of its zone. */
  constexpr bool has(int64_t position) const {
    if (count == 0) return false;
    // From the bottom up: half of the positions are out by the first coin.
    for (int group = 0, left = int(bits); left > 0; ++group, left -= kLevels) {
      const uint32_t at = uint32_t(position) >> (group * kLevels);
      const uint32_t coins = coins_of(group, at >> kLevels);
      uint32_t node = kLeaves + at % kLeaves;
      for (int level = 0; level < kLevels && level < left; ++level, node /= 2) {
        if ((coins >> (node / 2) & 1) != node % 2) return false;
      }
    }
    return true;
  }
  /** Of a position that it has. */
  constexpr int number(int64_t position) const { return int((position >> bits) - first); }
  /**
   * How many keys of so large a zone each stands for. Not the length of an interval: where
   * attention is even, the sum is then right whichever rows the intervals at both ends give.
   */
  constexpr float weight(int64_t zone) const { return float(zone) / float(count); }

 private:
  /**
   * The coins of so many levels, a group, come from one hash. An interval of its last level is the
   * root, node 1, of a tree; coin n decides between nodes 2 n and 2 n + 1.
   */
  static constexpr int kLevels = 5;
  static constexpr uint32_t kLeaves = 1u << kLevels;

  /** Of interval `top` of a group's last level, of which there are less than 2^27. */
  constexpr uint32_t coins_of(int group, uint32_t top) const {
    uint32_t x = (uint32_t(group) << 27 | top) ^ seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

  /** The position that is drawn from an interval. */
  constexpr int64_t row_of(int64_t interval) const {
    uint32_t at = uint32_t(interval);
    int level = int(bits);
    for (int group = (level - 1) / kLevels; level > 0; --group) {
      const int depth = (group + 1) * kLevels - level;  // below the root; 0 but for the first group
      const uint32_t top = at >> depth, coins = coins_of(group, top);
      uint32_t node = (1u << depth) + (at - (top << depth));
      while (node < kLeaves) node = 2 * node + (coins >> node & 1);
      at = top * kLeaves + node % kLeaves;
      level = group * kLevels;
    }
    return int64_t(at);
  }

  /** Intervals from position 0 on whose row comes before this position. */
  constexpr int64_t rows_before(int64_t position) const {
    const int64_t whole = position >> bits;
    return whole + (row_of(whole) < position ? 1 : 0);
  }
};

}  // namespace pariskv
