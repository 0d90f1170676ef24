/**
 * What PRKV stores of pages: runs of `page` positions, counted from 0, so that none crosses a
 * segment. A page's digest is two numbers a channel, the middle c of its keys and how far they are
 * from it, r: 16-bit floats in units of a power of two that the largest key sets. A key that is
 * not finite is no part of its page: it has no bit among the page's live ones.
 */
#pragma once

#include <cmath>
#include <cstdint>

#include "ops.h"
#include "policy/prkv/rules.h"

namespace pariskv {

/** Of some pages of each kv head, array after array. */
struct PageLayout {
  int64_t heads;
  int64_t pages;  // of a head
  int64_t key_dim;

  constexpr int64_t count() const { return heads * pages; }
  constexpr int64_t units_offset() const { return count() * 8; }
  constexpr int64_t digests_offset() const { return (count() * 12 + 63) / 64 * 64; }
  constexpr int64_t bytes() const {
    return (digests_offset() + count() * key_dim * 4 + 63) / 64 * 64;
  }

  /** Bit i: position i of the page has a key that counts. */
  uint64_t* live(void* block, int64_t head, int64_t page) const {
    return static_cast<uint64_t*>(block) + head * pages + page;
  }
  float* unit(void* block, int64_t head, int64_t page) const {
    return reinterpret_cast<float*>(static_cast<char*>(block) + units_offset()) + head * pages +
           page;
  }
  /** (2, key_dim): c, then r. */
  uint16_t* digest(void* block, int64_t head, int64_t page) const {
    return reinterpret_cast<uint16_t*>(static_cast<char*>(block) + digests_offset()) +
           (head * pages + page) * 2 * key_dim;
  }
};

/** The summaries of a segment. */
constexpr PageLayout pages_of(const ModelShape& shape, int64_t page) {
  return {shape.kv_heads, shape.segment_tokens / page, shape.rows.key_dim};
}

/**
 * What PRKV adds to a block of kept rows: pages that some of them come from, without these. A page
 * appears once for each head, the lowest first.
 *
 *   split  PRKVSplit                 of the budget, as it was for this block
 *   counts (heads) int64             pages
 *   number (heads, capacity) int64   of each page
 *   pages  PageLayout of capacity    live keys, and their digest
 */
struct AmendedLayout {
  int64_t heads;
  int64_t capacity;  // of kept rows, so of their pages
  int64_t key_dim;
  int64_t begin;  // where it is in a block

  constexpr PageLayout pages() const { return {heads, capacity, key_dim}; }
  constexpr int64_t pages_offset() const {
    return (int64_t(sizeof(PRKVSplit)) + (heads + heads * capacity) * 8 + 63) / 64 * 64;
  }
  constexpr int64_t bytes() const { return pages_offset() + pages().bytes(); }

  PRKVSplit* split(char* block) const { return reinterpret_cast<PRKVSplit*>(block + begin); }
  int64_t* count(char* block, int64_t head) const {
    return reinterpret_cast<int64_t*>(split(block) + 1) + head;
  }
  int64_t* numbers(char* block, int64_t head) const {
    return count(block, heads) + head * capacity;
  }
  char* digests(char* block) const { return block + begin + pages_offset(); }
};

constexpr AmendedLayout amended_of(const ModelShape& shape, int64_t capacity) {
  const int64_t rows = shape.kept(capacity).bytes();
  return {shape.kv_heads, capacity, shape.rows.key_dim, (rows + 63) / 64 * 64};
}

/** A number of a digest, which is finite. */
inline float digest_number(uint16_t half) {
  const int exponent = (half >> 10) & 31, mantissa = half & 1023;
  const float size = exponent == 0 ? std::ldexp(float(mantissa), -24)
                                   : std::ldexp(float(1024 + mantissa), exponent - 25);
  return (half & 0x8000) != 0 ? -size : size;
}

}  // namespace pariskv
