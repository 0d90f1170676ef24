/** CUDA's language and its built-in functions; every source that transform.py writes starts so. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/ptx.cuh"
#include "machine.h"

// From here on this is device code of that architecture; the toolkit's own headers are past.
#define __CUDA_ARCH__ PKV_EMULATED_ARCH

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __host__
#undef __launch_bounds__
#undef __maxnreg__
#undef __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device__
#define __forceinline__ inline
#define __global__
#define __host__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __noinline__

namespace emulator {

struct LaunchShape {
  dim3 blocks, threads;
  size_t shared_bytes;
  cudaStream_t stream;
};

/** `kernel<<<shape>>>(arguments)`, all of it done on return: the arguments are our caller's. */
template <typename Body>
void launch(const char* name, const LaunchShape& shape, Body body) {
  auto grid = std::make_unique<Grid>();
  grid->name = name;
  grid->blocks = shape.blocks;
  grid->threads = shape.threads;
  grid->shared_bytes = shape.shared_bytes;
  grid->body = body;
  enqueue(std::move(grid));
  flush();
}

template <typename T>
T& static_shared(const void* key) {
  constexpr size_t kAlignment = alignof(T) < 16 ? 16 : alignof(T);
  return *reinterpret_cast<T*>(static_shared_bytes(key, sizeof(T), kAlignment));
}
inline char* dynamic_shared() { return current->block->dynamic; }

inline void expect_full(unsigned mask) {
  if (mask != ~0u) fail("mask %08x: lanes of a part of a warp are not emulated", mask);
}

template <typename T>
const Slot* meet(Meeting meeting, const T& value) {
  static_assert(sizeof(T) <= sizeof(Slot));
  return meet(meeting, &value, sizeof value);
}
template <typename T>
T value_of(const Slot& slot) {
  T value;
  std::memcpy(static_cast<void*>(&value), slot.words, sizeof value);
  return value;
}
template <typename T>
T shuffle(unsigned mask, T value, unsigned from) {
  expect_full(mask);
  return value_of<T>(meet(Meeting::kShuffle, value)[from]);
}
template <typename T, typename Operation>
T reduce(unsigned mask, T value, Operation operation) {
  expect_full(mask);
  const Slot* slots = meet(Meeting::kReduce, value);
  T result = value_of<T>(slots[0]);
  for (int i = 1; i < 32; ++i) result = operation(result, value_of<T>(slots[i]));
  return result;
}

/** The operation in each of a word's lanes of so many bits. */
template <int kBits, typename Operation>
uint32_t in_lanes(uint32_t a, uint32_t b, Operation operation) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t result = 0;
  for (int i = 0; i < 32; i += kBits) {
    result |= operation(a >> i & kMask, b >> i & kMask) << i;
  }
  return result;
}
inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

template <dim3 Grid::* kExtents, unsigned dim3::* kAxis>
struct Extent {
  operator unsigned() const { return (current->block->grid->*kExtents).*kAxis; }
};
template <dim3 Grid::* kExtents>
struct Extents {
  Extent<kExtents, &dim3::x> x;
  Extent<kExtents, &dim3::y> y;
  Extent<kExtents, &dim3::z> z;
};

/** A GPU faults where a vector is not aligned, a CPU does not. */
template <typename T>
const T* aligned(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0) {
    fail("%p is not aligned for %zu bytes", static_cast<const void*>(pointer), sizeof(T));
  }
  return pointer;
}

}  // namespace emulator

#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::current->block->index)
// The other two are objects, for the runtime's structures have members of these names.
inline const emulator::Extents<&emulator::Grid::threads> blockDim{};
inline const emulator::Extents<&emulator::Grid::blocks> gridDim{};

// CUDA's min and max take two integers of different types.
template <typename T, typename U>
auto min(T a, U b) -> decltype(a + b) {
  using Common = decltype(a + b);
  if constexpr (std::is_floating_point_v<Common>) return std::fmin(Common(a), Common(b));
  return Common(a) < Common(b) ? Common(a) : Common(b);
}
template <typename T, typename U>
auto max(T a, U b) -> decltype(a + b) {
  using Common = decltype(a + b);
  if constexpr (std::is_floating_point_v<Common>) return std::fmax(Common(a), Common(b));
  return Common(a) > Common(b) ? Common(a) : Common(b);
}

// Threads.

inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}
inline void __syncthreads() { emulator::block_barrier("__syncthreads"); }
inline int __syncthreads_count(int predicate) { return emulator::block_count(predicate != 0); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline void __syncwarp(unsigned mask = ~0u) {
  emulator::expect_full(mask);
  emulator::meet(emulator::Meeting::kSync, nullptr, 0);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const unsigned first = emulator::current->lane / unsigned(width) * unsigned(width);
  return emulator::shuffle(mask, value, first + unsigned(from) % unsigned(width));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulator::shuffle(mask, value, emulator::current->lane ^ unsigned(bits));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = emulator::current->lane;
  return emulator::shuffle(mask, value, lane % unsigned(width) < by ? lane : lane - by);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = emulator::current->lane;
  return emulator::shuffle(mask, value, lane + by > 31 ? lane : lane + by);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  emulator::expect_full(mask);
  const uint32_t bit = predicate != 0;
  const emulator::Slot* slots = emulator::meet(emulator::Meeting::kVote, bit);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= slots[i].words[0] << i;
  return votes;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == ~0u;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulator::reduce(mask, value, [](T a, T b) { return T(unsigned(a) + unsigned(b)); });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulator::reduce(mask, value, [](T a, T b) { return a > b ? a : b; });
}

// Memory. A fiber gives way at meetings and barriers only, so everything is atomic.

template <typename T>
T __ldcg(const T* pointer) {
  return *emulator::aligned(pointer);
}
template <typename T>
void __stcg(T* pointer, T value) {
  emulator::aligned(pointer);
  *pointer = value;
}
inline void __threadfence() {}
template <typename T, typename U>
T atomicAdd(T* pointer, U value) {
  const T old = *pointer;
  *pointer = T(old + T(value));
  return old;
}
template <typename T, typename U>
T atomicMax(T* pointer, U value) {
  const T old = *pointer;
  if (T(value) > old) *pointer = T(value);
  return old;
}
template <typename T, typename U>
T atomicOr(T* pointer, U value) {
  const T old = *pointer;
  *pointer = T(old | T(value));
  return old;
}
template <typename T, typename U>
T atomicExch(T* pointer, U value) {
  const T old = *pointer;
  *pointer = T(value);
  return old;
}
template <typename T, typename U, typename V>
T atomicCAS(T* pointer, U expected, V value) {
  const T old = *pointer;
  if (old == T(expected)) *pointer = T(value);
  return old;
}

// Arithmetic.

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
/** Rounded down; the sum is exact as a double unless one is lost in the other. */
inline float __fadd_rd(float a, float b) {
  const double sum = double(a) + double(b);
  const float nearest = float(sum);
  return double(nearest) > sum ? std::nextafter(nearest, -INFINITY) : nearest;
}
/** Rounded up, of factors whose product is exact as a double. */
inline float __fmaf_ru(float a, float b, float c) {
  const double sum = std::fma(double(a), double(b), double(c));
  const float nearest = float(sum);
  return double(nearest) < sum ? std::nextafter(nearest, INFINITY) : nearest;
}

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  return pariskv::cuda::device::ptx::prmt(x, y, selector & 0x7777);
}
inline uint32_t __vmaxu4(uint32_t a, uint32_t b) {
  return emulator::in_lanes<8>(a, b, emulator::larger);
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return emulator::in_lanes<16>(a, b, emulator::larger);
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return emulator::in_lanes<16>(a, b, emulator::smaller);
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(uint64_t x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) << by % 32 >> 32);
}
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) >> emulator::smaller(by, 32));
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += int(int8_t(a >> i)) * int(int8_t(b >> i));
  return sum;
}
/** Two numbers of 16 bits, and the lower two of four of 8, or the upper two. */
inline int __dp2a_lo(int pair, int four, int sum) {
  for (int i = 0; i < 2; ++i) sum += int(int16_t(pair >> 16 * i)) * int(int8_t(four >> 8 * i));
  return sum;
}
inline int __dp2a_hi(int pair, int four, int sum) { return __dp2a_lo(pair, four >> 16, sum); }
// Through double, where the products are exact.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto fma = [](__half x, __half y, __half z) {
    return __double2half(
        std::fma(double(__half2float(x)), double(__half2float(y)), double(__half2float(z))));
  };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto fma = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return __double2bfloat16(std::fma(double(__bfloat162float(x)), double(__bfloat162float(y)),
                                      double(__bfloat162float(z))));
  };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}

// The runtime's templates; nvcc brings these.
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
