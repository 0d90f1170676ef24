/**
 * Codes of candidates, which lie here and there in device memory, brought to shared memory: many
 * small copies under way at once, some candidates ahead of those that are worked on.
 */
#pragma once

#include "device/score.cuh"
#include "device/staging.cuh"

namespace pariskv::cuda::device {

/** How the code of a key lies in shared memory: record, sign bytes, scale. */
template <int kWords>
struct CodeLayout {
  static constexpr int kRecord = 16 * kWords, kSigns = 4 * kWords;
  static constexpr int kScaleAt = kRecord + kSigns;
  static constexpr int kPitch = (kScaleAt + 4 + 15) / 16 * 16;
  static constexpr int kSignPieces = kSigns < 16 ? 1 : kSigns / 16;
  static constexpr int kPieces = kWords + kSignPieces + 1;
  static constexpr int kLanes = kPieces <= 8 ? 8 : 16;  // that bring one key
};

/** Candidates that are brought at a time. */
template <int kWords>
constexpr int kGathered = kWords == 8 ? 96 : 192;
template <int kWords>
constexpr int kGatherBytes = 2 * kGathered<kWords> * CodeLayout<kWords>::kPitch;

__device__ __forceinline__ void copy_bytes_async(void* to, const void* from, int bytes) {
  const uint32_t target = shared_address(to);
  if (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  } else if (bytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(from) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/** Sets codes of `count` candidates on their way. All threads. */
template <int kWords>
__device__ __forceinline__ void gather_codes(const Zone& zone, const int32_t* offsets, int count,
                                             char* to) {
  using Layout = CodeLayout<kWords>;
  const int piece = int(threadIdx.x) % Layout::kLanes;
  constexpr int kStep = kThreads / Layout::kLanes;
#pragma unroll 4
  for (int i = int(threadIdx.x) / Layout::kLanes; i < count; i += kStep) {
    if (piece >= Layout::kPieces) break;
    const Slot at = slot_of(zone, zone.begin + offsets[i]);
    char* code = to + i * Layout::kPitch;
    if (piece < kWords) {
      copy_bytes_async(code + 16 * piece,
                       at.block + zone.layout.records(zone.head, at.slot) + 16 * piece, 16);
    } else if (piece < kWords + Layout::kSignPieces) {
      constexpr int kBytes = Layout::kSigns < 16 ? Layout::kSigns : 16;
      const int from = kBytes * (piece - kWords);
      copy_bytes_async(code + Layout::kRecord + from,
                       at.block + zone.layout.signs(zone.head, at.slot) + from, kBytes);
    } else {
      // Two scales, of which ours is one.
      const uint8_t* scale = at.block + zone.layout.scales(zone.head, at.slot & ~1);
      copy_bytes_async(code + Layout::kScaleAt, scale, 4);
    }
  }
}

}  // namespace pariskv::cuda::device
