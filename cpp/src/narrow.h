/**
 * Rows of a zone in 8 bits (RowType::kInt8). Where a search knows means of neighbouring keys, a key
 * is rounded less its mean, and V less the common part of its head's first ones:
 *
 *   key(d)   = stretch(d) * (centre(d) + mean(d) + scale * level(d))
 *   value(d) = centre(d) + unit(d) * scale * level(d)              scale: of the row's half
 *
 * With a scale alone the loudest channel of a row would take the levels from all others
 * (tail_copies.h). A scale alone it is where a search knows of no means, and in a sequence of an
 * old file. A key that centre and mean only make larger is written without them: then its scale has
 * a minus. So a huge key among its neighbours does not cost these their levels.
 *
 * Plain arithmetic that rounds every operation once: CPU and GPU write the same bytes.
 */
#pragma once

#include <cstdint>

#include "host_device.h"
#include "tail_copies.h"

namespace pariskv {

/** Where a search keeps the numbers that are taken off, of all kv heads; in bytes. */
struct NarrowLayout {
  int64_t block = 0;  // neighbouring keys that share a mean; 0: rows have a scale alone
  int64_t key_dim, value_dim;
  // In the state of a sequence.
  int64_t stretch;      // (heads, key_dim) float
  int64_t gain;         // the same: 1 / stretch
  int64_t centre_step;  // (heads) float: the step of the centre
  int64_t centre;       // (heads, key_dim) int16
  int64_t based;        // int32: 0, until all of this is there
  int64_t values;       // (heads, 2, value_dim) float: centres, then units
  // In the summaries of a segment.
  int64_t means;       // (heads, blocks, mean_bytes) int8: key_dim, then zeros
  int64_t mean_steps;  // (heads, blocks) float
  int64_t blocks, mean_bytes;

  constexpr bool any() const { return block > 0; }
  constexpr int64_t value_bytes(int64_t heads) const {
    return 2 * heads * value_dim * int64_t(sizeof(float));
  }
};

/** The common part of V is that of the zone's first rows, at most so many. */
constexpr int64_t kMostValueRows = 1024;

/** The common part of the rows of one head. */
struct NarrowBase {
  NarrowLayout layout;
  char* state = nullptr;  // null: they have a scale alone
  int64_t head = 0;

  /** @param sequence  the state of the search, or null */
  PKV_HOST_DEVICE static NarrowBase of(const NarrowLayout& layout, void* sequence, int64_t head) {
    char* const state = static_cast<char*>(sequence);
    const bool based = layout.any() && state != nullptr &&
                       *reinterpret_cast<const int32_t*>(state + layout.based) != 0;
    return {layout, based ? state : nullptr, head};
  }

  PKV_HOST_DEVICE bool any() const { return state != nullptr; }
  PKV_HOST_DEVICE const float* stretch() const {
    return reinterpret_cast<const float*>(state + layout.stretch) + head * layout.key_dim;
  }
  PKV_HOST_DEVICE const float* gain() const {
    return reinterpret_cast<const float*>(state + layout.gain) + head * layout.key_dim;
  }
  PKV_HOST_DEVICE float centre(int64_t d) const {
    const float step = reinterpret_cast<const float*>(state + layout.centre_step)[head];
    return float(
               reinterpret_cast<const int16_t*>(state + layout.centre)[head * layout.key_dim + d]) *
           step;
  }
  PKV_HOST_DEVICE CommonPart values() const { return values_of(layout, state, head); }
  PKV_HOST_DEVICE static CommonPart values_of(const NarrowLayout& layout, char* state,
                                              int64_t head) {
    float* centre = reinterpret_cast<float*>(state + layout.values) + 2 * head * layout.value_dim;
    return {centre, centre + layout.value_dim};
  }

  /** The mean of a block of keys, in steps. */
  struct Mean {
    const int8_t* levels;  // (key_dim)
    float step;
  };
  /** Of the keys around a slot of a segment. */
  PKV_HOST_DEVICE Mean mean(const uint8_t* summaries, int64_t slot) const {
    const int64_t number = head * layout.blocks + slot / layout.block;
    return {reinterpret_cast<const int8_t*>(summaries + layout.means) + number * layout.mean_bytes,
            reinterpret_cast<const float*>(summaries + layout.mean_steps)[number]};
  }
  /** Centre and mean of a channel. */
  PKV_HOST_DEVICE float of_key(const Mean& mean, int64_t d) const {
    return float(mean.levels[d]) * mean.step + centre(d);
  }

  /** A number of K or V as it is rounded is affine(it, factor, added), and back. */
  struct Way {
    float factor, added;

    constexpr float operator()(float x) const { return affine(x, factor, added); }
  };
  /** @param base  of_key, or 0 for a key with a minus */
  PKV_HOST_DEVICE Way of_key_left(int64_t d, float base) const { return {gain()[d], -base}; }
  PKV_HOST_DEVICE Way of_key_back(int64_t d, float base) const {
    return {stretch()[d], base * stretch()[d]};
  }
  PKV_HOST_DEVICE Way of_value_left(int64_t d) const {
    const float factor = 1.0f / values().unit[d];
    return {factor, -(values().centre[d] * factor)};
  }
  PKV_HOST_DEVICE Way of_value_back(int64_t d) const {
    return {values().unit[d], values().centre[d]};
  }
};

}  // namespace pariskv
