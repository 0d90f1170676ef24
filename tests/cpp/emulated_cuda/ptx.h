/** The instructions that kernels write as inline assembly; transform.py says which is which. */
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace emulator::ptx {

void cluster_arrive();
void cluster_wait();
void grid_wait();

/** A word that others write; who reads the same again and again waits for another. */
void load_told(uint32_t& out, const uint32_t* word);
/** A token in the upper half, with something besides. */
void load_told(uint64_t& out, const uint64_t* word);
inline void tell(uint32_t* word, uint32_t what) { *word = what; }
inline void tell(uint64_t* word, uint64_t what) { *word = what; }

void barrier_init(uint32_t address, uint32_t arrivals);
void barrier_arrive(uint32_t address);
void barrier_expect(uint32_t address, uint32_t bytes);
bool barrier_wait(uint32_t address, uint32_t parity);
inline void barrier_arrive_expect(uint32_t address, uint32_t bytes) {
  barrier_expect(address, bytes);
  barrier_arrive(address);
}
inline void barrier_test(uint64_t& done, uint32_t address, uint32_t parity) {
  done = barrier_wait(address, parity);
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  bulk_load(to, from, bytes, barrier);
}
inline void cache_policy(uint64_t& policy) { policy = 0; }
void bulk_store(void* to, uint32_t from, uint32_t bytes);
void bulk_commit();
/** Until all are done; to have read and to have written is the same here. */
void bulk_wait(int);

void stage(uint32_t to, const void* from, int size, int bytes);
inline void stage(uint32_t to, const void* from, int size) { stage(to, from, size, size); }
void stage_commit();
void stage_wait(int groups);
void stage_arrive(uint32_t barrier);

void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier);
inline void send(uint32_t to, uint32_t word, uint32_t barrier) {
  send_words(to, &word, 1, barrier);
}
inline void send(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t barrier) {
  const uint32_t words[4] = {a, b, c, d};
  send_words(to, words, 4, barrier);
}
inline void map_address(uint32_t& out, uint32_t address, int rank) {
  out = emulator::map_address(address, rank);
}

/** A byte per digit of the selector: of the eight of x and y, or its sign where the digit says so.
 */
inline void permute_bytes(uint32_t& out, uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 15;
    const uint32_t byte = uint32_t(bytes >> 8 * (digit & 7)) & 255;
    out |= (digit & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
}

inline void load_shared(uint32_t& out, uint32_t address) {
  std::memcpy(&out, from_shared(address, 4, 4), 4);
}
/** It may name any address that can be read. */
inline void prefetch(const void* address) { (void)*static_cast<const volatile char*>(address); }
template <typename T>
void select(T& out, T yes, T no, uint64_t predicate) {
  out = predicate != 0 ? yes : no;
}
inline void select(uint32_t& out, int yes, int no, uint64_t predicate) {
  out = uint32_t(predicate != 0 ? yes : no);
}

/** Which lane is up to the hardware: here the last, which nobody would have in mind. */
inline void elect(uint64_t& elected, uint32_t mask) {
  if (mask != ~0u) fail("elect.sync of some lanes");
  meet(Meeting::kVote, nullptr, 0);
  elected = current->lane == 31;
}

// Approximations have the last bits of a CPU here, which is within what a GPU promises.

inline float without_subnormals(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
inline void exp2(float& y, float x) { y = without_subnormals(std::exp2(without_subnormals(x))); }
inline void log2(float& y, float x) { y = std::log2(without_subnormals(x)); }
inline void reciprocal(float& y, float x) { y = without_subnormals(1.0f / without_subnormals(x)); }
inline void reciprocal_root(float& y, float x) {
  y = float(1.0 / std::sqrt(double(without_subnormals(x))));
}
inline void max_nan(float& y, float a, float b) { y = a != a || b != b ? NAN : std::fmax(a, b); }
inline void fma_saturated(float& y, float a, float b, float c) {
  const float sum = std::fma(a, b, c);
  y = sum > 0 ? std::fmin(sum, 1.0f) : 0.0f;  // and zero for NaN
}

// Matrices. Lane 4 g + t of a warp has rows g and g + 8 of A and of the sums, column g of B, and
// there words t, t + 4 along the inner dimension (columns 2 t and 2 t + 1 of the sums).

/**
 * 16 x 8 sums of the products of 16 rows and 8 columns, kParts times four words each.
 * @param mine  a lane's words: two per part of A, then one per part of B
 * @param dot   adds to a sum the product of two words
 */
template <int kParts, typename Sum, typename Dot>
void multiply(Sum (&sums)[4], const uint32_t (&mine)[3 * kParts], Dot dot) {
  const Slot* slots = meet(Meeting::kMatrix, mine, sizeof mine);
  const unsigned g = current->lane / 4, t = current->lane % 4;
  for (unsigned word = 0; word < 4; ++word) {
    for (int part = 0; part < kParts; ++part) {
      const uint32_t* a = slots[4 * g + word].words + 2 * part;
      for (unsigned column = 0; column < 2; ++column) {
        const uint32_t b = slots[4 * (2 * t + column) + word].words[2 * kParts + part];
        dot(sums[column], a[0], b);
        dot(sums[2 + column], a[1], b);
      }
    }
  }
}

inline void add_bits(int& sum, uint32_t a, uint32_t b) { sum += __builtin_popcount(a & b); }
inline void add_bytes(int& sum, uint32_t a, uint32_t b) {
  for (int i = 0; i < 32; i += 8) sum += int((a >> i & 255) * (b >> i & 255));
}
// Products are exact and sums have more bits than on a GPU, which does not say how many it has.
inline void add_halves(double& sum, uint32_t a, uint32_t b) {
  const auto number = [](uint32_t bits) {
    return double(__half2float(__half(__half_raw{uint16_t(bits)})));
  };
  sum += number(a) * number(b);
  sum += number(a >> 16) * number(b >> 16);
}
inline void add_bfloat16s(double& sum, uint32_t a, uint32_t b) {
  const auto number = [](uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return double(x);
  };
  sum += number(a << 16) * number(b << 16);
  sum += number(a & 0xffff0000) * number(b & 0xffff0000);
}

/** The instruction's operands in their order: results, A, B, what they are added to. */
template <typename Sum, typename Word, typename Dot, typename T>
void mma(Dot dot, T& c0, T& c1, T& c2, T& c3, Word a0, Word a1, Word a2, Word a3, Word b0, Word b1,
         T d0, T d1, T d2, T d3) {
  Sum sums[4] = {d0, d1, d2, d3};
  multiply<2>(sums, {a0, a1, a2, a3, b0, b1}, dot);
  c0 = T(sums[0]), c1 = T(sums[1]), c2 = T(sums[2]), c3 = T(sums[3]);
}
template <typename Sum, typename Word, typename Dot, typename T>
void mma(Dot dot, T& c0, T& c1, T& c2, T& c3, Word a0, Word a1, Word b, T d0, T d1, T d2, T d3) {
  Sum sums[4] = {d0, d1, d2, d3};
  multiply<1>(sums, {a0, a1, b}, dot);
  c0 = T(sums[0]), c1 = T(sums[1]), c2 = T(sums[2]), c3 = T(sums[3]);
}
template <typename... Operands>
void mma_bits(Operands&&... operands) {
  mma<int, uint32_t>(add_bits, operands...);
}
template <typename... Operands>
void mma_bytes(Operands&&... operands) {
  mma<int, uint32_t>(add_bytes, operands...);
}
template <typename... Operands>
void mma_half(Operands&&... operands) {
  mma<double, uint32_t>(add_halves, operands...);
}
template <typename... Operands>
void mma_bfloat16(Operands&&... operands) {
  mma<double, uint32_t>(add_bfloat16s, operands...);
}

/** Four matrices of 8 x 8 16-bit numbers; lanes 8 i to 8 i + 7 have the rows of matrix i. */
template <bool kTransposed>
void load_matrices(uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3, uint32_t address) {
  const Slot* slots = meet(Meeting::kMatrix, &address, sizeof address);
  uint32_t* const out[4] = {&m0, &m1, &m2, &m3};
  const unsigned g = current->lane / 4, t = current->lane % 4;
  const auto row = [&](unsigned i) { return from_shared(slots[i].words[0], 16, 16); };
  for (unsigned m = 0; m < 4; ++m) {
    if constexpr (kTransposed) {
      uint16_t numbers[2];
      std::memcpy(&numbers[0], row(8 * m + 2 * t) + 2 * g, 2);
      std::memcpy(&numbers[1], row(8 * m + 2 * t + 1) + 2 * g, 2);
      std::memcpy(out[m], numbers, 4);
    } else {
      std::memcpy(out[m], row(8 * m + g) + 4 * t, 4);
    }
  }
}

}  // namespace emulator::ptx
