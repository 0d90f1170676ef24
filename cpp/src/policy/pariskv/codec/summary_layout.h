/**
 * How the summary of a key is laid out, on every backend alike.
 *
 * A segment of `tokens` keys of `kv_heads` heads is one piece of memory of four planes, and two
 * more where neighbours share a mean (block_means.h):
 *
 *   signs    (kv_heads, tokens, subspaces)       the coarse score reads these two
 *   norms    (kv_heads, tokens)
 *   scales   (kv_heads, tokens) uint16           the rerank reads these two as well
 *   records  (kv_heads, tokens, record_bytes)
 *   means    (kv_heads, tokens / block, rotated_dim) int8, in steps of
 *   steps    (kv_heads, tokens / block) float
 *
 * and a record is three bit planes of magnitude codes (plane p holds bit p of every
 * rotated dimension, dimension d at bit d % 8 of byte d / 8), then one weight per
 * subspace. At head_dim 128 that is 16 + 1 + 2 + 64 = 83 bytes per key and head.
 */
#pragma once

#include <cstdint>

namespace pariskv {

/** Dimensions per subspace. */
constexpr int64_t kSubspaceDim = 8;

struct SummaryLayout {
  int64_t kv_heads;
  int64_t tokens;
  int64_t rotated_dim;
  int64_t block;  // keys that share a mean; 0: none do

  // Unsigned: a shift, also on a GPU.
  constexpr int64_t subspaces() const { return int64_t(uint64_t(rotated_dim) / kSubspaceDim); }
  constexpr int64_t plane_bytes() const { return int64_t(uint64_t(rotated_dim) / 8); }
  constexpr int64_t weights_offset() const { return 3 * plane_bytes(); }
  constexpr int64_t record_bytes() const { return weights_offset() + subspaces(); }
  constexpr int64_t key_bytes() const { return subspaces() + 1 + 2 + record_bytes(); }
  constexpr int64_t blocks() const { return block == 0 ? 0 : tokens / block; }
  constexpr int64_t bytes() const {
    return kv_heads * (tokens * key_bytes() + blocks() * (rotated_dim + int64_t(sizeof(float))));
  }

  // Offsets in a block, in bytes. Every plane starts on a cache line: tokens is a multiple of 64.
  constexpr int64_t signs_at(int64_t head, int64_t slot) const {
    return (head * tokens + slot) * subspaces();
  }
  constexpr int64_t norms_at(int64_t head, int64_t slot) const {
    return kv_heads * tokens * subspaces() + head * tokens + slot;
  }
  constexpr int64_t scales_at(int64_t head, int64_t slot) const {
    return kv_heads * tokens * (subspaces() + 1) + 2 * (head * tokens + slot);
  }
  constexpr int64_t records_at(int64_t head, int64_t slot) const {
    return kv_heads * tokens * (subspaces() + 3) + (head * tokens + slot) * record_bytes();
  }

  // Of the block with this number in the segment.
  constexpr int64_t means_at(int64_t head, int64_t number) const {
    return kv_heads * tokens * key_bytes() + (head * blocks() + number) * rotated_dim;
  }
  constexpr int64_t steps_at(int64_t head, int64_t number) const {
    return kv_heads * (tokens * key_bytes() + blocks() * rotated_dim) +
           (head * blocks() + number) * int64_t(sizeof(float));
  }

  uint8_t* signs(uint8_t* segment, int64_t head, int64_t slot) const {
    return segment + signs_at(head, slot);
  }
  uint8_t* norms(uint8_t* segment, int64_t head, int64_t slot) const {
    return segment + norms_at(head, slot);
  }
  uint16_t* scales(uint8_t* segment, int64_t head, int64_t slot) const {
    return reinterpret_cast<uint16_t*>(segment + scales_at(head, slot));
  }
  uint8_t* records(uint8_t* segment, int64_t head, int64_t slot) const {
    return segment + records_at(head, slot);
  }
  int8_t* means(uint8_t* segment, int64_t head, int64_t number) const {
    return reinterpret_cast<int8_t*>(segment + means_at(head, number));
  }
  float* steps(uint8_t* segment, int64_t head, int64_t number) const {
    return reinterpret_cast<float*>(segment + steps_at(head, number));
  }
};

/**
 * The norm of a key as the coarse score sees it: 4 exponent and 4 mantissa bits,
 * 2^-5 to just under 2^11, the bits of a float shifted and offset. 0 marks a key that is
 * never selected. In units of 2^-9 it is a whole number under 2^20, so sums are exact.
 */
constexpr uint32_t kNormShift = 19;
constexpr int32_t kNormBase = (127 - 5) << 4;
constexpr double kNormUnit = 0x1p-9;

constexpr uint8_t norm_code(uint32_t norm_bits) {
  const int32_t code = int32_t((norm_bits + (1u << (kNormShift - 1))) >> kNormShift) - kNormBase;
  return uint8_t(code < 1 ? 1 : code > 255 ? 255 : code);
}

constexpr int64_t norm_units(uint8_t code) {
  return code == 0 ? 0 : int64_t(16 + (code & 15)) << (code >> 4);
}

/**
 * The scale of a key's weights: the upper 16 bits below a float's sign, rounded up, so that
 * the largest of its weights is at most 255 / 255 of it.
 */
constexpr uint32_t kScaleShift = 15;

constexpr uint16_t scale_code(uint32_t bits) {
  const uint32_t code = (bits + (1u << kScaleShift) - 1) >> kScaleShift;
  return uint16_t(code > 0xfeff ? 0xfeff : code);  // 0xff00 and up are infinity and NaN
}
/** The bits of a scale. */
constexpr uint32_t scale_bits(uint16_t code) { return uint32_t{code} << kScaleShift; }

}  // namespace pariskv
