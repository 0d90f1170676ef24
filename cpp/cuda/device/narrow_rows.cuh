/**
 * Rows in 8 bits (RowType::kInt8): numbers from -127 to 127, and behind those of K and of V a float
 * that they are multiplied by. Rows begin at multiples of four bytes.
 */
#pragma once

#include "device/matrix.cuh"
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

/** Two bytes of such a word, from byte `i` on, as elements of the tensor cores. */
template <typename Element>
__device__ __forceinline__ uint32_t bytes_to_elements(uint32_t bytes, int i) {
  if constexpr (std::is_same_v<Element, __half>) {
    // 1024 + byte, of which a half has all bits.
    const uint32_t two = __byte_perm(bytes, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    const __half2 middle = __floats2half2_rn(1024.0f + kMiddle, 1024.0f + kMiddle);
    const __half2 less = __hsub2(reinterpret_cast<const __half2&>(two), middle);
    return reinterpret_cast<const uint32_t&>(less);
  } else {
    // 128 + the lower seven bits, of which a bfloat16 has all; less 128, or 256 where the eighth is
    // not set.
    const uint32_t two = __byte_perm(bytes, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
    const uint32_t lower = two & 0xff7fff7fu, less = (two & 0xff80ff80u) ^ 0x00800080u;
    const __nv_bfloat162 number = __hsub2(reinterpret_cast<const __nv_bfloat162&>(lower),
                                          reinterpret_cast<const __nv_bfloat162&>(less));
    return reinterpret_cast<const uint32_t&>(number);
  }
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

  /** Eight neighbouring numbers as they are stored. */
  using Piece = uint2;
  static __device__ __forceinline__ Piece piece(const char* half, int d) {
    const auto* words = reinterpret_cast<const uint32_t*>(half + d);
    return {words[0], words[1]};
  }
  static __device__ __forceinline__ uint4 elements(const Piece& piece) {
    const uint32_t first = around_middle(piece.x), second = around_middle(piece.y);
    return {bytes_to_elements<Element>(first, 0), bytes_to_elements<Element>(first, 2),
            bytes_to_elements<Element>(second, 0), bytes_to_elements<Element>(second, 2)};
  }

  template <int kWords>
  struct Operands {
    uint32_t bytes[(kWords + 1) / 2];

    __device__ __forceinline__ uint32_t word(int i) const {
      return bytes_to_elements<Element>(around_middle(bytes[i / 2]), i % 2 * 2);
    }
  };
  template <int kWords>
  static __device__ __forceinline__ void load(const char* half, int d, int dim,
                                              Operands<kWords>& operands) {
    const char* from = half + d;
    if constexpr (kWords == 1) {
      operands.bytes[0] = d < dim ? *reinterpret_cast<const uint16_t*>(from) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        operands.bytes[i] = d + 4 * i < dim ? *reinterpret_cast<const uint32_t*>(from + 4 * i) : 0;
      }
    }
  }
};

/** The reader of rows of a zone. */
template <typename Element, bool kNarrow>
using ZoneReader = std::conditional_t<kNarrow, NarrowReader<Element>, RowReader<Element>>;

}  // namespace pariskv::cuda::device
