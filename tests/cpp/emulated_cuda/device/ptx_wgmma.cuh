/**
 * The emulator's version of cpp/cuda/device/ptx_wgmma.cuh: a warpgroup's products are done when
 * they are asked for, and warps need not wait for each other.
 */
#pragma once

#include "ptx.cuh"

namespace pariskv::cuda::device::ptx {

inline void wgmma_fence() { emulator::meet(emulator::Meeting::kSync, nullptr, 0); }
inline void wgmma_commit_group() { emulator::meet(emulator::Meeting::kSync, nullptr, 0); }
template <int kGroups>
void wgmma_wait_group() {
  emulator::meet(emulator::Meeting::kSync, nullptr, 0);
}
template <int kBlocks>
void pin(float (&)[kBlocks][4]) {}

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

inline bool barrier_red_or(int id, int threads, bool predicate) {
  return emulator::numbered_count(id, threads, predicate) > 0;
}

inline bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  return emulator::phase_has_ended(barrier, parity);
}
inline void barrier_sync(int id, int threads) { emulator::numbered_count(id, threads, false); }
inline void barrier_arrive(int id, int threads) { emulator::numbered_arrive(id, threads, false); }

/** The second factor, in shared memory: what its descriptor says. */
class Second {
 public:
  explicit Second(uint64_t descriptor)
      : address_(shared_address(emulator::current->block->window) & 0xff000000u |
                 uint32_t(descriptor & 0x3fff) << 4),
        slabs_(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        eights_(uint32_t(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emulator::fail("a factor whose pieces lie in another order");
  }
  /** Of a row of numbers that are multiplied: they lie side by side. */
  uint16_t of_row(unsigned row, unsigned k) const {
    return number(address_ + row / 8 * eights_ + row % 8 * 128 + k * 2);
  }
  /** Of a column whose neighbours lie side by side. */
  uint16_t of_column(unsigned column, unsigned k) const {
    return number(address_ + column / 64 * slabs_ + k / 8 * eights_ + k % 8 * 128 +
                  column % 64 * 2);
  }

 private:
  static uint16_t number(uint32_t address) {
    uint16_t bits;
    std::memcpy(&bits, emulator::from_shared(address ^ (address >> 3 & 0x70), 2, 2), 2);
    return bits;
  }
  uint32_t address_, slabs_, eights_;
};

/** sums (+)= a b for this lane; a(row of the warp, k), b(column, k). */
template <bool kHalf, int kBlocks, typename A, typename B>
void multiply_rows(float (&sums)[kBlocks][4], bool adds, A a, B b) {
  const auto number = [](uint16_t bits) {
    if constexpr (kHalf) return double(_cvtsh_ss(bits));
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return double(x);
  };
  const unsigned g = emulator::current->lane / 4, t = emulator::current->lane % 4;
  double rows[2][16];
  for (unsigned k = 0; k < 16; ++k) rows[0][k] = number(a(g, k)), rows[1][k] = number(a(g + 8, k));
  for (unsigned i = 0; i < 2 * kBlocks; ++i) {
    double column[16];
    for (unsigned k = 0; k < 16; ++k) column[k] = number(b(i / 2 * 8 + 2 * t + i % 2, k));
    for (unsigned r = 0; r < 2; ++r) {
      float& sum = sums[i / 2][2 * r + i % 2];
      double exact = adds ? double(sum) : 0.0;
      for (unsigned k = 0; k < 16; ++k) exact += rows[r][k] * column[k];
      sum = float(exact);
    }
  }
}

template <bool kHalf, bool kTransposed, int kBlocks>
void products(float (&sums)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  const emulator::Slot* slots = emulator::meet(emulator::Meeting::kMatrix, a, sizeof a);
  const Second right(b);
  multiply_rows<kHalf>(
      sums, adds,
      [&](unsigned row, unsigned k) {
        const uint32_t word = slots[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2];
        return uint16_t(word >> 16 * (k % 2));
      },
      [&](unsigned column, unsigned k) {
        return kTransposed ? right.of_column(column, k) : right.of_row(column, k);
      });
}

inline void wgmma_m64n64k16_bf16(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b,
                                 bool adds) {
  products<false, false>(sums, a, b, adds);
}
inline void wgmma_m64n64k16_f16(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b,
                                bool adds) {
  products<true, false>(sums, a, b, adds);
}
inline void wgmma_m64n64k16_bf16_trans(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b) {
  products<false, true>(sums, a, b, true);
}
inline void wgmma_m64n64k16_f16_trans(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b) {
  products<true, true>(sums, a, b, true);
}
inline void wgmma_m64n128k16_bf16_trans(float (&sums)[16][4], const uint32_t (&a)[4], uint64_t b) {
  products<false, true>(sums, a, b, true);
}
inline void wgmma_m64n128k16_f16_trans(float (&sums)[16][4], const uint32_t (&a)[4], uint64_t b) {
  products<true, true>(sums, a, b, true);
}

}  // namespace pariskv::cuda::device::ptx
