/**
 * The coarse score by votes: a key gets those of the centroids that its sign bytes name. Equal to
 * cpu/plain/score.cpp bit for bit.
 */
#pragma once

#include "pariskv/decode/score/keys.cuh"

namespace pariskv::cuda::device {

/** Units [first, end) of this warp, by the votes (subspaces, 256) of one searcher. */
template <int kWords>
__device__ __forceinline__ void score_votes(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const uint8_t* table, const ScoreOutput& out) {
  constexpr int kKeys = kUnitKeys<kWords>;
  for_units(ring, zone, first, end, [&](int unit, const uint8_t* stage, auto release) {
#pragma unroll 2
    for (int key = lane_id(); key < kKeys; key += 32) {
      const auto* words = reinterpret_cast<const uint32_t*>(stage) + key * kWords;
      uint32_t best = 1;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t word = words[w];
#pragma unroll
        for (int b = 0; b < 4; ++b) best += table[(4 * w + b) * 256 + (word >> 8 * b & 255)];
      }
      if (stage[kUnitSignBytes<kWords> + key] == 0) best = 0;
      uint8_t* score = out.scores + int64_t(unit) * kKeys + key;
      if (out.earlier) best = max(best, uint32_t(*score));
      *score = uint8_t(best);
      if (out.last) out.count(4 * best);
    }
    release();
  });
}

/** Votes of one searcher. */
template <int kWords>
__device__ __forceinline__ void copy_votes(const uint8_t* votes, int searcher, uint8_t* table) {
  constexpr int kEntries = 4 * kWords * 256;
  const auto* from = reinterpret_cast<const uint32_t*>(votes + int64_t(searcher) * kEntries);
  for (int i = threadIdx.x; i < kEntries / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(table)[i] = __ldcg(from + i);
  }
}

// Four searchers at a time, their votes in the bytes of words; sums stay under 256: at most 6 votes
// in 32 subspaces. A row of the table is a centroid's votes in every subspace, each as often as it
// takes to fill all banks, and the lanes go through the subspaces in 32 different ways: at any time
// each of them reads from a bank of its own.

constexpr int kBanks = 32;
template <int kWords>
constexpr int kCopies = kBanks / (4 * kWords);

/** Units [first, end) of this warp, by the votes (256, kBanks) of four searchers. */
template <int kWords>
__device__ __forceinline__ void score_packed(Ring<kWords>& ring, const Zone& zone, int first,
                                             int end, const uint32_t* table,
                                             const ScoreOutput& out) {
  constexpr int kKeys = kUnitKeys<kWords>, kLow = 16 / kWords;
  // A lane has two neighbouring keys. Its bits say which of them comes first, which word, and
  // which byte and copy.
  const int lane = held_lane();
  const int second = lane / 16, turn = lane / kLow % kWords, rest = lane % kLow + kLow * second;
  const int byte = rest % 4, copy = rest / 4;
  uint32_t select[4], places[kWords][4], words[kWords];
#pragma unroll
  for (int b = 0; b < 4; ++b) select[b] = 0x4440 + (b ^ byte);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = (2 * lane + second) * 4 * kWords + 4 * (w ^ turn);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int subspace = 4 * (w ^ turn) + (b ^ byte);
      places[w][b] = shared_address(table) + 4 * (subspace * kCopies<kWords> + copy);
    }
  }
  const uint32_t lower = second ? 0x1054 : 0x5410, upper = second ? 0x3276 : 0x7632;
  for_units(ring, zone, first, end, [&](int unit, const uint8_t* stage, auto release) {
    uint8_t* target = out.scores + int64_t(unit) * kKeys + 2 * lane;
#pragma unroll 1
    for (int part = 0; part < kKeys; part += 64) {
      uint32_t tops[2];  // of two searchers each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t sums = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const uint32_t word = ptx::ld_shared(shared_address(stage) + part * 4 * kWords +
                                               (words[w] ^ (i * 4 * kWords)));
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            sums += ptx::ld_shared((__byte_perm(word, 0, select[b]) * (4 * kBanks)) + places[w][b]);
          }
        }
        tops[i] = __vmaxu2(sums & 0x00ff00ff, sums >> 8 & 0x00ff00ff);
      }
      uint32_t best =
          __vmaxu2(__byte_perm(tops[0], tops[1], lower), __byte_perm(tops[0], tops[1], upper)) +
          0x00010001;
      // 255 times a code bounds what is unusable, and nothing else.
      const uint32_t codes =
          *reinterpret_cast<const uint16_t*>(stage + kUnitSignBytes<kWords> + part + 2 * lane);
      best = __vminu2(best, __byte_perm(codes, 0, 0x4140) * 255);
      uint32_t pair = __byte_perm(best, 0, 0x4420);
      auto* score = reinterpret_cast<uint16_t*>(target + part);
      if (out.earlier) {
        pair = __vmaxu4(pair, *score);
        best = __byte_perm(pair, 0, 0x4140);
      }
      *score = uint16_t(pair);
      if (out.last) out.count_pair(best);
    }
    release();
  });
}

/**
 * The table of searchers [first, first + 4); missing ones have no votes.
 * @param votes  (searchers, subspaces, 256) of the head
 * @param table  (256, kBanks)
 */
template <int kWords>
__device__ __forceinline__ void pack_votes(const uint8_t* votes, int first, int searchers,
                                           uint32_t* table) {
  constexpr int kSubspaces = 4 * kWords, kEntries = kSubspaces * 256;
  static_assert(kThreads == 256);
  const int subspace = int(threadIdx.x) % kSubspaces;
  const int begin = int(threadIdx.x) / kSubspaces * kSubspaces;  // as many centroids, by eights
#pragma unroll 1
  for (int id = begin; id < begin + kSubspaces; id += 8) {
    uint2 of[4];  // votes of eight centroids, by searcher
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      of[h] = make_uint2(0, 0);
      if (first + h >= searchers) continue;
      of[h] = __ldcg(reinterpret_cast<const uint2*>(votes + int64_t(first + h) * kEntries +
                                                    subspace * 256 + id));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) x[h] = half ? of[h].y : of[h].x;
      const uint32_t ab = __byte_perm(x[0], x[1], 0x5140), cd = __byte_perm(x[2], x[3], 0x5140);
      const uint32_t ef = __byte_perm(x[0], x[1], 0x7362), gh = __byte_perm(x[2], x[3], 0x7362);
      const uint32_t packed[4] = {__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632),
                                  __byte_perm(ef, gh, 0x5410), __byte_perm(ef, gh, 0x7632)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t* to = table + (id + 4 * half + i) * kBanks + subspace * kCopies<kWords>;
#pragma unroll
        for (int copy = 0; copy < kCopies<kWords>; ++copy) to[copy] = packed[i];
      }
    }
  }
}

}  // namespace pariskv::cuda::device
