/**
 * A stored row as device code sees it: where it lies, and how its numbers are read. A row is K,
 * then V, each of which is a half; a format says how the numbers of a half are written
 * (row_format.h). Every kernel finds rows by `row_of_segment` and reads halves by a RowReader.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/unpack.cuh"

namespace pariskv::cuda::device {

/** A row of a segment, which has (heads, tokens) of them. */
template <typename Byte>
__device__ __forceinline__ Byte* row_of_segment(Byte* segment, int head, int64_t tokens,
                                                int64_t slot, int64_t row_bytes) {
  return segment + (head * tokens + slot) * row_bytes;
}

/**
 * The row of a position.
 * @param segments    a pointer to each segment
 * @param by_segment  divides by `tokens`, the positions of a segment
 */
template <typename Divisor>
__device__ __forceinline__ char* row_of(void* const* segments, const Divisor& by_segment,
                                        int tokens, int head, int position, int64_t row_bytes) {
  const int segment = int(by_segment(position));
  return row_of_segment(static_cast<char*>(segments[segment]), head, tokens,
                        position - segment * tokens, row_bytes);
}

/**
 * How a half is read where its numbers are elements of a tensor, as they were given. A half is
 * found by its address alone. Numbers are asked for from a multiple of their count on.
 *
 * A reader of another format has the same members.
 */
template <typename Element>
struct RowReader {
  using Number = Element;
  /** Whether numbers are still to be multiplied by a scale. */
  static constexpr bool kScaled = false;

  /** Bytes from the beginning of a half to its number `d`, and where that is. */
  static __device__ __forceinline__ int offset(int d) { return d * int(sizeof(Number)); }
  static __device__ __forceinline__ const char* at(const char* half, int d) {
    return half + offset(d);
  }
  /** Bytes from the beginning of a row to its V. */
  static __device__ __forceinline__ int value_offset(int key_dim) { return offset(key_dim); }
  /** One of `dim` numbers of a half. */
  static __device__ __forceinline__ float number(const char* half, int d, int /*dim*/) {
    return to_float(*reinterpret_cast<const Number*>(at(half, d)));
  }
  /** Bytes that a copy of a row in whole vectors begins before it: rows begin with a vector. */
  static __device__ __forceinline__ int lead(const char*) { return 0; }
  /** Where in the room of its copy that begins. */
  static __device__ __forceinline__ int place(const char*) { return 0; }
  /** Neighbouring numbers from an address on: 2, 4 or a multiple of 8. */
  template <int kCount>
  static __device__ __forceinline__ void floats(const char* from, float (&x)[kCount]) {
    load_words<kCount>(reinterpret_cast<const Number*>(from), x);
  }

  /** Neighbouring numbers as they are stored: 2 or 4. */
  template <int kCount>
  using Raw = Neighbours<Number, kCount>;
  template <int kCount>
  static __device__ __forceinline__ Raw<kCount> raw(const char* half, int d) {
    return *reinterpret_cast<const Raw<kCount>*>(at(half, d));
  }

  /** kPer16 neighbouring numbers as they are stored, to be held until they are used. */
  static constexpr int kPer16 = kElementsPer16<Element>;
  using Piece = uint4;
  static __device__ __forceinline__ Piece piece(const char* half, int d) {
    return *reinterpret_cast<const uint4*>(at(half, d));
  }
  static __device__ __forceinline__ void unpack(const uint4& piece, float (&x)[kPer16]) {
    device::unpack<Element>(piece, x);
  }

  /** A piece as the tensor cores take it. */
  static __device__ __forceinline__ uint4 elements(const Piece& piece) { return piece; }

  /**
   * 2 kWords numbers as they are stored, zeros beyond the `dim` numbers of the half, for `word`s of
   * two that the tensor cores take; kWords is 1, 2 or a multiple of 4.
   */
  template <int kWords>
  struct Operands {
    uint32_t words[kWords];

    __device__ __forceinline__ uint32_t word(int i) const { return words[i]; }
  };
  template <int kWords>
  static __device__ __forceinline__ void load(const char* half, int d, int dim,
                                              Operands<kWords>& operands) {
    static_assert(sizeof(Element) == 2);
    auto& words = operands.words;
    const char* from = at(half, d);
    constexpr int kStep = kWords % 4 == 0 ? 4 : kWords;  // words that come at a time
#pragma unroll
    for (int i = 0; i < kWords; i += kStep) {
      const bool there = d + 2 * i < dim;
      if constexpr (kStep == 4) {
        const uint4 four = there ? *reinterpret_cast<const uint4*>(from + 4 * i) : uint4{};
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      } else if constexpr (kStep == 2) {
        const uint2 two = there ? *reinterpret_cast<const uint2*>(from + 4 * i) : uint2{};
        words[i] = two.x, words[i + 1] = two.y;
      } else {
        words[i] = there ? *reinterpret_cast<const uint32_t*>(from + 4 * i) : 0;
      }
    }
  }

  /** A token's new K and V become a stored row: thread `first` of `threads`, all of which come. */
  static __device__ __forceinline__ void write(char* row, const Element* k, int key_dim,
                                               const Element* v, int value_dim, int first,
                                               int threads) {
    auto* to = reinterpret_cast<Number*>(row);
    for (int d = first; d < key_dim; d += threads) to[d] = k[d];
    for (int d = first; d < value_dim; d += threads) to[key_dim + d] = v[d];
  }
};

}  // namespace pariskv::cuda::device
