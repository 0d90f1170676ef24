/**
 * score_pages: what each page of a zone promises the query heads of its group, by its digest. A few
 * blocks for each kv head share its pages; two threads have a page, with eight of its sixteen lanes
 * each. Sums are in the CPU's order, so scores are equal bit for bit: cpu/simd/kernels.h.
 */
#pragma once

#include "device/partition.cuh"
#include "device/unpack.cuh"
#include "prkv/decode/context.cuh"

namespace pariskv::cuda {

constexpr int kPagesAtOnce = device::kThreads / 2;
/** Queries that are scored together, and that are in shared memory at once. */
constexpr int kQuad = 4, kStagedQueries = 16;
/** ScorePagesRun of cpu/simd/kernels.h has more of it. */
constexpr float kMostScore = 0x1p100f;

/** Of a block, in shared memory. */
struct PageScoreSpace {
  PageContext context;
  int amended[kPagesAtOnce];  // of the pages that come next: which amended one; -1: none
  bool asks[kStagedQueries];
};

template <typename Element>
struct ScorePages {
  const PageScoreParams& params;
  PageScoreSpace& space;
  int rank;        // of the blocks of the head
  float* queries;  // (kStagedQueries, key_dim), of shared memory

  __device__ __forceinline__ int dim() const { return space.context.shape.key_dim; }
  /** Which eight lanes are this thread's. */
  static __device__ __forceinline__ int half() { return int(threadIdx.x) % 2; }

  /** Queries from `first` on, as floats; returns how many of them have a say. Ends with a barrier.
   */
  __device__ __forceinline__ int stage(int first) const {
    const PageContext& context = space.context;
    const int staged =
        min(kStagedQueries, (context.shape.group - first + kQuad - 1) / kQuad * kQuad);
    bool asks = false;
    for (int i = device::warp_id(); i < staged; i += device::kWarps) {
      const bool exists = first + i < context.shape.group;
      const Rows& q = params.call.q;
      const auto* from = reinterpret_cast<const Element*>(q.data) + context.row * q.stride_i +
                         (int64_t(context.head) * context.shape.group + first + i) * q.stride_j;
      bool whole = exists;
      for (int d = device::lane_id(); d < dim(); d += 32) {
        const float x = exists ? device::to_float(from[d]) : 0.0f;
        queries[i * dim() + d] = x;
        whole = whole && device::finite(x);
      }
      whole = __all_sync(~0u, whole);
      if (device::lane_id() == 0) space.asks[i] = whole;
    }
    __syncthreads();
    asks = int(threadIdx.x) < staged && space.asks[threadIdx.x % kStagedQueries];
    return __syncthreads_count(asks);
  }

  /** Sums of this thread's lanes become those of two queries, all lanes of them: folded. */
  static __device__ __forceinline__ void fold(float (&sums)[kQuad][8], float (&own)[2]) {
    const bool upper = half() == 1;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float keep = upper ? sums[2 + j][i] : sums[j][i];
        const float give = upper ? sums[j][i] : sums[2 + j][i];
        x[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, give, 1));
      }
#pragma unroll
      for (int step = 4; step >= 1; step /= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < step) x[i] = __fadd_rn(x[i], x[i + step]);
        }
      }
      own[j] = x[0];
    }
  }

  /** A page's score for the staged queries [quad, quad + 4) is added. All lanes of a warp. */
  __device__ __forceinline__ float add_quad(int quad, const uint4* numbers, bool exists, float unit,
                                            float score) const {
    const int steps = dim() / 16;
    float sums[kQuad][8] = {};
    const float* query = queries + quad * dim() + 8 * half();
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const uint4 zero = make_uint4(0, 0, 0, 0);
      const uint4* at = numbers + 2 * step + half();
      const uint4 c = exists ? at[0] : zero, r = exists ? at[2 * steps] : zero;
      float middle[8], distance[8];
      device::unpack<__half>(c, middle);
      device::unpack<__half>(r, distance);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const auto* from = reinterpret_cast<const float4*>(query + j * dim() + 16 * step);
        const float4 low = from[0], high = from[1];
        const float q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[j][i] = __fmaf_rn(q[i], middle[i], sums[j][i]);
          sums[j][i] = __fmaf_rn(fabsf(q[i]), distance[i], sums[j][i]);
        }
      }
    }
    float own[2];
    fold(sums, own);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = __fmul_rn(own[j], unit);
      const float above = x > -kMostScore ? x : -kMostScore;
      own[j] = above < kMostScore ? above : kMostScore;
    }
    const float other[2] = {__shfl_xor_sync(~0u, own[0], 1), __shfl_xor_sync(~0u, own[1], 1)};
    const bool upper = half() == 1;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const float x = upper == (j >= 2) ? own[j % 2] : other[j % 2];
      if (space.asks[quad + j]) score = __fadd_rn(score, x);
    }
    return score;
  }

  /** Amended pages that come before page `begin` of the sequence. All threads. */
  static __device__ __forceinline__ int amended_before(const int64_t* numbers, int count,
                                                       int begin) {
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += device::kThreads) {
      const int i = first + int(threadIdx.x);
      before += __syncthreads_count(i < count && numbers[i] < begin);
    }
    return before;
  }
  /**
   * Notes which of the pages [begin, end) of the sequence are amended: from number `next` on.
   * Returns how many. Ends with a barrier.
   */
  __device__ __forceinline__ int note_amended(const int64_t* numbers, int count, int next,
                                              int begin, int end) const {
    const int thread = int(threadIdx.x), i = next + thread;
    if (thread < kPagesAtOnce) space.amended[thread] = -1;
    __syncthreads();
    const int page = thread < kPagesAtOnce && i < count ? int(numbers[i]) : end;
    if (page < end) space.amended[page - begin] = i;
    return __syncthreads_count(page < end);
  }

  /** Digest of a page as it is without regard to kept rows. */
  __device__ __forceinline__ device::PageNumbers whole_page(int page) const {
    const ModelShape& shape = params.call.shape;
    const int size = int(params.call.rules.page), segment = int(params.by_segment(page * size));
    const PageLayout layout = pages_of(shape, size);
    char* block = reinterpret_cast<char*>(space.context.summaries[segment]);
    return device::page_numbers(layout, block, space.context.head,
                                page - segment * int(layout.pages));
  }

  /** Digests of pages set out for the L2 cache before it is known which of them are amended. */
  __device__ __forceinline__ void prefetch(int page, int end) const {
    if (page >= end) return;
    const uint16_t* digest = whole_page(page).digest;
    for (int i = half(); i < dim() / 32; i += 2) device::ptx::prefetch_global_l2(digest + 64 * i);
  }

  /**
   * Scores of the pages [begin, end) of the sequence for the staged queries, of which `first` is
   * the group's number. Returns how many of the pages are live.
   */
  __device__ __forceinline__ int score(int begin, int end, int first,
                                       const device::AmendedHead& amended) const {
    const PageContext& context = space.context;
    const PageScratch scratch = page_scratch(params.scratch, context.scratch, context.capacity);
    const int page = begin + int(threadIdx.x) / 2, group = context.shape.group;
    const bool exists = page < end;
    const int other = exists && context.kept != nullptr ? space.amended[page - begin] : -1;
    device::PageNumbers numbers{};
    if (exists) numbers = other < 0 ? whole_page(page) : amended.page(other);
    const uint64_t live = exists ? *numbers.live : 0;
    const float unit = exists ? *numbers.unit : 0.0f;
    const int at = page - context.first_page;
    float score = exists && first > 0 ? scratch.scores[at] : 0.0f;
    const int staged = min(kStagedQueries, group - first);
#pragma unroll 1
    for (int quad = 0; quad < staged; quad += kQuad) {
      score = add_quad(quad, reinterpret_cast<const uint4*>(numbers.digest), exists, unit, score);
    }
    if (exists && half() == 0) {
      const bool last = first + kStagedQueries >= group;
      scratch.scores[at] = last && live == 0 ? -device::infinity() : score;
      scratch.live[at] = live;
    }
    return __syncthreads_count(live != 0 && half() == 0);
  }

  __device__ __forceinline__ void run() const {
    const PageContext& context = space.context;
    if (context.pages == 0) return;
    const int begin =
        context.first_page + device::share_begin(context.pages, rank, params.blocks_per_head);
    const int end =
        context.first_page + device::share_begin(context.pages, rank + 1, params.blocks_per_head);
    prefetch(begin + int(threadIdx.x) / 2, min(begin + kPagesAtOnce, end));
    const bool amends = context.kept != nullptr;
    const device::AmendedHead amended = amended_pages(params.call.shape, context);
    const int64_t* numbers = amends ? amended.numbers() : nullptr;
    const int count = amends ? int(*amended.count()) : 0;
    const int first_amended = amended_before(numbers, count, begin);
    int asking = 0, live = 0;
#pragma unroll 1
    for (int first = 0; first < context.shape.group; first += kStagedQueries) {
      if (first > 0) __syncthreads();
      asking += stage(first);
      int next = first_amended;
      live = 0;
#pragma unroll 1
      for (int base = begin; base < end; base += kPagesAtOnce) {
        const int stop = min(base + kPagesAtOnce, end);
        if (base > begin) prefetch(base + int(threadIdx.x) / 2, stop);
        if (amends) next += note_amended(numbers, count, next, base, stop);
        live += score(base, stop, first, amended);
      }
    }
    if (threadIdx.x != 0) return;
    PageSearch* search = page_scratch(params.scratch, context.scratch, context.capacity).search;
    search->live[rank] = live;
    if (rank == 0) search->asking = asking;
  }
};

template <typename Element>
__global__ void __launch_bounds__(device::kThreads, 2)
    score_pages(const __grid_constant__ PageScoreParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ PageScoreSpace space;
  __shared__ int exists;
  const int index = int(params.by_blocks(int(blockIdx.x)));
  device::let_successor_start();
  if (threadIdx.x == 0) {
    exists = find_pages_context(params, index, space.context, [](const SequenceView&) {});
  }
  __syncthreads();
  if (exists != 0) {
    ScorePages<Element>{params, space, int(blockIdx.x) - index * params.blocks_per_head,
                        reinterpret_cast<float*>(shared)}
        .run();
  }
  // One that ends after the kernel before is enough: until then this one has not ended.
  if (blockIdx.x == 0) device::wait_for_predecessor();
}

}  // namespace pariskv::cuda
