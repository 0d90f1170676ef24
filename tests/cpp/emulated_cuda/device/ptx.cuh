/**
 * The emulator's version of cpp/cuda/device/ptx.cuh, which it replaces: the same functions, in C++.
 * Those with no body here are in tests/cpp/emulated_cuda/meetings.cpp and, beside it,
 * tests/cpp/emulated_cuda/shared_memory.cpp.
 */
#pragma once

#include <cuda_fp16.h>
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../machine.h"

namespace pariskv::cuda::device {

constexpr bool kHopper = PKV_EMULATED_ARCH >= 900;

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

namespace ptx {

void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes);
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  mbarrier_expect_tx(barrier, bytes);
  mbarrier_arrive(barrier);
}
bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity);

/** Starts a copy of `bytes` bytes, and of zeros up to `size`. */
void cp_async(uint32_t to, const void* from, int size, int bytes);
inline void cp_async_cg_16(uint32_t to, const void* from, bool present = true) {
  cp_async(to, from, 16, present ? 16 : 0);
}
inline void cp_async_cg_16_in_lines(uint32_t to, const void* from) { cp_async(to, from, 16, 16); }
template <typename T>
void cp_async_ca(T* to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  cp_async(shared_address(to), from, sizeof(T), sizeof(T));
}
void cp_async_commit_group();
void cp_async_wait(int groups);
template <int kGroups>
void cp_async_wait_group() {
  cp_async_wait(kGroups);
}
void cp_async_mbarrier_arrive_noinc(uint64_t* barrier);

void cp_async_bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
inline void cp_async_bulk_load_evict_first(void* to, const void* from, uint32_t bytes,
                                           uint64_t* barrier) {
  cp_async_bulk_load(to, from, bytes, barrier);
}
void cp_async_bulk_store(void* to, const void* from, uint32_t bytes);
void cp_async_bulk_commit_group();
/** To have read and to have written is the same here. */
void cp_async_bulk_wait_all();
inline void cp_async_bulk_wait_all_read() { cp_async_bulk_wait_all(); }

// Nothing to do: fibers of one thread see each other's writes in order.
inline void fence_proxy_async_shared() {}
inline void fence_mbarrier_init() {}

void cluster_arrive();
inline void barrier_cluster_arrive_release() { cluster_arrive(); }
inline void barrier_cluster_arrive_relaxed() { cluster_arrive(); }
void barrier_cluster_wait_acquire();

inline uint32_t mapa(const void* pointer, int rank) {
  return emulator::map_address(shared_address(pointer), rank);
}
void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier);
inline void st_async(uint32_t to, const int4& x, uint32_t barrier) {
  const uint32_t words[4] = {uint32_t(x.x), uint32_t(x.y), uint32_t(x.z), uint32_t(x.w)};
  send_words(to, words, 4, barrier);
}
inline void st_async(uint32_t to, uint32_t x, uint32_t barrier) { send_words(to, &x, 1, barrier); }

/** Which lane is up to the hardware: here the last, which is the least expected one. */
inline bool elect_sync() {
  emulator::meet(emulator::Meeting::kVote, nullptr, 0);
  return emulator::current->lane == 31;
}

void griddepcontrol_wait();
inline void griddepcontrol_launch_dependents() {}  // flush() starts successors whenever it likes

inline void st_release_gpu(uint32_t* word, uint32_t value) { *word = value; }
inline void st_relaxed_gpu(uint64_t* word, uint64_t value) { *word = value; }
/** A thread that reads the same value of a word again waits until another thread changes it. */
uint32_t ld_acquire_gpu(const uint32_t* word);
/** The same by the flag, in the upper half. */
uint64_t ld_relaxed_gpu(const uint64_t* word);

inline uint32_t ld_shared(uint32_t address) {
  uint32_t value;
  std::memcpy(&value, emulator::from_shared(address, 4, 4), 4);
  return value;
}
/** It may name any address that can be read. */
/** Graphs of this machine have no conditions. */
inline void set_condition(uint64_t, int) {}
inline void prefetch_global_l2(const void* address) {
  (void)*static_cast<const volatile char*>(address);
}

// Approximations have the last bits of a CPU here, which is within what a GPU promises.

inline float without_subnormals(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
inline float ex2_approx_ftz(float x) {
  return without_subnormals(std::exp2(without_subnormals(x)));
}
inline float lg2_approx_ftz(float x) { return std::log2(without_subnormals(x)); }
inline float rcp_approx_ftz(float x) { return without_subnormals(1.0f / without_subnormals(x)); }
inline float rsqrt_approx_ftz(float x) {
  return float(1.0 / std::sqrt(double(without_subnormals(x))));
}
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); }
inline float fma_rn_sat(float a, float b, float c) {
  const float sum = std::fma(a, b, c);
  return sum > 0 ? std::fmin(sum, 1.0f) : 0.0f;  // and zero for NaN
}
/** A byte per digit of the selector: of the eight of x and y, or its sign where the digit says so.
 */
inline uint32_t prmt(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t four = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 15;
    const uint32_t byte = uint32_t(bytes >> 8 * (digit & 7)) & 255;
    four |= (digit & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return four;
}

// Matrices. Lane 4 g + t of a warp has rows g and g + 8 of A and of the sums, column g of B, and
// there words t, t + 4 along the inner dimension (columns 2 t and 2 t + 1 of the sums).

/** Four matrices of 8 x 8 16-bit numbers; lanes 8 i to 8 i + 7 have the rows of matrix i. */
template <bool kTransposed>
void load_matrices(uint32_t (&out)[4], uint32_t address) {
  const emulator::Slot* slots =
      emulator::meet(emulator::Meeting::kMatrix, &address, sizeof address);
  const unsigned g = emulator::current->lane / 4, t = emulator::current->lane % 4;
  const auto row = [&](unsigned i) { return emulator::from_shared(slots[i].words[0], 16, 16); };
  for (unsigned m = 0; m < 4; ++m) {
    if constexpr (kTransposed) {
      uint16_t numbers[2];
      std::memcpy(&numbers[0], row(8 * m + 2 * t) + 2 * g, 2);
      std::memcpy(&numbers[1], row(8 * m + 2 * t + 1) + 2 * g, 2);
      std::memcpy(&out[m], numbers, 4);
    } else {
      std::memcpy(&out[m], row(8 * m + g) + 4 * t, 4);
    }
  }
}
inline void ldmatrix_x4(uint32_t (&blocks)[4], uint32_t address) {
  load_matrices<false>(blocks, address);
}
inline void ldmatrix_x4_trans(uint32_t (&blocks)[4], uint32_t address) {
  load_matrices<true>(blocks, address);
}

/**
 * 16 x 8 sums of the products of 16 rows and 8 columns, kParts times four words each.
 * @param mine  a lane's words: two per part of A, then one per part of B
 * @param dot   adds to a sum the product of two words
 */
template <typename Exact, int kParts, typename Sum, typename Dot>
void mma(Sum (&sums)[4], const uint32_t (&mine)[3 * kParts], Dot dot) {
  const emulator::Slot* slots = emulator::meet(emulator::Meeting::kMatrix, mine, sizeof mine);
  const unsigned g = emulator::current->lane / 4, t = emulator::current->lane % 4;
  Exact exact[4] = {Exact(sums[0]), Exact(sums[1]), Exact(sums[2]), Exact(sums[3])};
  for (unsigned word = 0; word < 4; ++word) {
    for (int part = 0; part < kParts; ++part) {
      const uint32_t* a = slots[4 * g + word].words + 2 * part;
      for (unsigned column = 0; column < 2; ++column) {
        const uint32_t b = slots[4 * (2 * t + column) + word].words[2 * kParts + part];
        dot(exact[column], a[0], b);
        dot(exact[2 + column], a[1], b);
      }
    }
  }
  for (int i = 0; i < 4; ++i) sums[i] = Sum(exact[i]);
}

// Objects rather than functions: so mma() has them inline.
inline constexpr auto add_bits = [](int& sum, uint32_t a, uint32_t b) {
  sum += __builtin_popcount(a & b);
};
inline constexpr auto add_bytes = [](int& sum, uint32_t a, uint32_t b) {
  for (int i = 0; i < 32; i += 8) sum += int((a >> i & 255) * (b >> i & 255));
};
inline constexpr auto add_signed_bytes = [](int& sum, uint32_t a, uint32_t b) {
  for (int i = 0; i < 32; i += 8) sum += int(int8_t(a >> i)) * int(int8_t(b >> i));
};
inline constexpr auto add_signed_by_bytes = [](int& sum, uint32_t a, uint32_t b) {
  for (int i = 0; i < 32; i += 8) sum += int(int8_t(a >> i)) * int(b >> i & 255);
};
// Products are exact and sums have more bits than on a GPU, which does not say how many it has.
inline constexpr auto add_halves = [](double& sum, uint32_t a, uint32_t b) {
  const auto number = [](uint32_t bits) { return double(_cvtsh_ss(uint16_t(bits))); };
  sum += number(a) * number(b);
  sum += number(a >> 16) * number(b >> 16);
};
inline constexpr auto add_bfloat16s = [](double& sum, uint32_t a, uint32_t b) {
  const auto number = [](uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return double(x);
  };
  sum += number(a << 16) * number(b << 16);
  sum += number(a & 0xffff0000) * number(b & 0xffff0000);
};

inline void mma_m16n8k16_f16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<double, 2>(sums, {a[0], a[1], a[2], a[3], b0, b1}, add_halves);
}
inline void mma_m16n8k16_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<double, 2>(sums, {a[0], a[1], a[2], a[3], b0, b1}, add_bfloat16s);
}
inline void mma_m16n8k8_f16(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  mma<double, 1>(sums, {a0, a1, b}, add_halves);
}
inline void mma_m16n8k8_bf16(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  mma<double, 1>(sums, {a0, a1, b}, add_bfloat16s);
}
inline void mma_m16n8k32_u8(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<int, 2>(sums, {a[0], a[1], a[2], a[3], b[0], b[1]}, add_bytes);
}
inline void mma_m16n8k32_s8(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<int, 2>(sums, {a[0], a[1], a[2], a[3], b[0], b[1]}, add_signed_bytes);
}
inline void mma_m16n8k32_s8_u8(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<int, 2>(sums, {a[0], a[1], a[2], a[3], b[0], b[1]}, add_signed_by_bytes);
}
inline void mma_m16n8k128_b1_and_popc(int32_t (&sums)[4], const uint32_t (&a)[2],
                                      const uint32_t (&b)[1]) {
  mma<int, 1>(sums, {a[0], a[1], b[0]}, add_bits);
}
inline void mma_m16n8k256_b1_and_popc(int32_t (&sums)[4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[2]) {
  mma<int, 2>(sums, {a[0], a[1], a[2], a[3], b[0], b[1]}, add_bits);
}

}  // namespace ptx

}  // namespace pariskv::cuda::device
