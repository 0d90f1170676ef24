/**
 * Rows in 8 bits (RowType::kInt8): numbers from -127 to 127, and behind those of K and of V a float
 * that they are multiplied by. Rows begin at multiples of four bytes.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/stored_rows.cuh"

namespace pariskv::cuda::device {

/** Four numbers of a word, as bytes around kMiddle. */
constexpr int kMiddle = 128;
__device__ __forceinline__ uint32_t around_middle(uint32_t word) { return word ^ 0x80808080u; }

/** Byte i of such a word: from 2^23 + byte, of which a float's lower bits are whole. */
__device__ __forceinline__ float byte_to_float(uint32_t bytes, int i) {
  return __fsub_rn(float_of(__byte_perm(bytes, 0x4b000000u, 0x7440 | i)),
                   8388608.0f + float(kMiddle));
}

/** As RowReader. Numbers are whole: who sums products of them multiplies by the scales. */
template <typename Element>
struct NarrowReader {
  using Number = int8_t;
  static constexpr bool kScaled = true;

  static __device__ __forceinline__ int offset(int d) { return d; }
  static __device__ __forceinline__ int value_offset(int key_dim) {
    return key_dim + int(sizeof(float));
  }
  /** Of one of `dim` numbers, a multiple of four as all dimensions of heads are. */
  static __device__ __forceinline__ float scale(const char* half, int dim) {
    return *reinterpret_cast<const float*>(half + dim);
  }
  /** Whether K has neither centre nor mean: see narrow.h. */
  static __device__ __forceinline__ bool is_bare(const char* key, int key_dim) {
    return bits_of(scale(key, key_dim)) >> 31 != 0;
  }
  /** Of K and of V of a row. */
  static __device__ __forceinline__ float2 scales(const char* row, int key_dim, int value_dim) {
    return make_float2(scale(row, key_dim), scale(row + value_offset(key_dim), value_dim));
  }
  /** A number as it counts. */
  static __device__ __forceinline__ float number(const char* half, int d, int dim) {
    return __fmul_rn(float(reinterpret_cast<const Number*>(half)[d]), scale(half, dim));
  }

  /** Rows are copied with all of their first and last 16 bytes. */
  static __device__ __forceinline__ int lead(const char* row) {
    return int(reinterpret_cast<uintptr_t>(row) & 15);
  }
  /** As far from a line of 128 bytes as the row is: else the copy engine cuts lines in two, which
   * takes a third longer over the bus. */
  static __device__ __forceinline__ int place(const char* row) {
    return int(reinterpret_cast<uintptr_t>(row) & 127) - lead(row);
  }

  template <int kCount>
  static __device__ __forceinline__ void floats(const char* from, float (&x)[kCount]) {
    if constexpr (kCount == 2) {
      const uint32_t bytes = around_middle(*reinterpret_cast<const uint16_t*>(from));
      x[0] = byte_to_float(bytes, 0), x[1] = byte_to_float(bytes, 1);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const uint32_t bytes = around_middle(*reinterpret_cast<const uint32_t*>(from + i));
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] = byte_to_float(bytes, j);
      }
    }
  }
};

/** The reader of rows of a zone. */
template <typename Element, bool kNarrow>
using ZoneReader = std::conditional_t<kNarrow, NarrowReader<Element>, RowReader<Element>>;

}  // namespace pariskv::cuda::device
