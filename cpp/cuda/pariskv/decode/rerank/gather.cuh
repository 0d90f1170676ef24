/**
 * Codes of candidates, which lie here and there in device memory, brought to shared memory: many
 * small copies under way at once, some candidates ahead of those that are worked on.
 */
#pragma once

#include "device/partition.cuh"
#include "device/ptx.cuh"
#include "pariskv/decode/zone.cuh"

namespace pariskv::cuda::device {

/** Where a key's summary is. */
struct alignas(16) KeyPlace {
  const uint8_t* block;  // null: it has none, zeros come for it
  int slot;
  int candidate;  // among those of its head; below 0: a sample
};

/**
 * How the code of a key lies in shared memory: record, sign bytes, scale; all of it comes in pieces
 * of 16 bytes, with what lies beside it there.
 */
template <int kWords>
struct CodeLayout {
  static constexpr int kSignsAt = 16 * kWords;
  static constexpr int kSignPieces = kWords <= 4 ? 1 : kWords / 4;
  static constexpr int kScaleAt = kSignsAt + 16 * kSignPieces;
  static constexpr int kPieces = kWords + kSignPieces + 1;
  static constexpr int kPitch = 16 * (kPieces | 1);  // odd: neighbouring keys in other banks
  static constexpr int kLanes = kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;  // that bring one key

  static __device__ __forceinline__ int signs(int slot) {
    return kSignsAt + (kWords == 2 ? 8 * (slot & 1) : 0);
  }
  static __device__ __forceinline__ int scale(int slot) { return kScaleAt + 2 * (slot & 7); }
};

/** Candidates that are brought at a time: as many as there is room for. */
template <int kWords>
constexpr int kGathered = kWords == 16  ? 64
                          : kWords == 8 ? 128
                                        : 256;
template <int kWords>
constexpr int kGatherBytes = 2 * kGathered<kWords> * CodeLayout<kWords>::kPitch;

/** What a thread copies of every code that it takes part in: a piece of it. */
template <int kWords>
class Gather {
  using Layout = CodeLayout<kWords>;

 public:
  __device__ __forceinline__ explicit Gather(const Zone& zone) {
    const int piece = int(threadIdx.x) % Layout::kLanes;
    has_ = piece < Layout::kPieces;
    const bool record = piece < kWords, sign = !record && piece < kWords + Layout::kSignPieces;
    plane_ = record ? zone.layout.records_at(zone.head, 0) + 16 * piece
             : sign ? zone.layout.signs_at(zone.head, 0) + 16 * (piece - kWords)
                    : zone.layout.scales_at(zone.head, 0);
    step_ = record ? 16 * kWords : sign ? 4 * kWords : 2;
  }

  /** Sets codes of `count` candidates on their way. All threads. */
  __device__ __forceinline__ void start(const KeyPlace* places, int count, char* to) const {
    if (!has_) return;
    constexpr int kStep = kThreads / Layout::kLanes;
    const int first = int(threadIdx.x) / Layout::kLanes;
    uint32_t target =
        shared_address(to) + first * Layout::kPitch + 16 * (int(threadIdx.x) % Layout::kLanes);
#pragma unroll 4
    for (int i = first; i < count; i += kStep) {
      const KeyPlace place = places[i];
      ptx::cp_async_cg_16(target, place.block + plane_ + ((place.slot * step_) & ~15),
                          place.block != nullptr);
      target += kStep * Layout::kPitch;
    }
  }

 private:
  bool has_;
  int64_t plane_;  // of a block: where those of the first key are
  int step_;       // bytes from key to key
};

}  // namespace pariskv::cuda::device
