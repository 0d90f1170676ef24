/**
 * Shared by all kernels of exact attention: where queries and rows lie, and how a query ends. A
 * launch attends to a range of rows, its blocks to shares of it. Where several launches or shares
 * make one result, a query's running softmax is stored in `states` in between.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/stored_rows.cuh"

namespace pariskv::cuda::device {

/** The last `tokens` tokens of a sequence of `total`, over rows [begin, end) of it. */
struct ExactParameters {
  void* const* const* rows;  // the member of the sequence that points to its table
  const char* staged;        // null, or where segments from `staged_segment` on lie in a row
  int64_t staged_segment;
  int64_t total, tokens;
  int64_t begin, end;
  int32_t segment_tokens;
  int32_t group;
  int32_t key_dim, value_dim;
  const char* q;  // (tokens, query heads, key_dim), strides in elements
  int64_t q_stride_i, q_stride_j;
  char* out;  // null: not wanted
  int64_t out_stride_i, out_stride_j;
  float* lse;  // null: not wanted
  int64_t lse_stride;
  float scale, softcap;
  const float* sink_bias;  // null: none
  float* states;  // (shares, kv heads, tokens * group), see exact_state; null: one launch does all
  int32_t shares;
  bool resumes;        // states are there from rows before
  bool fast;           // weights in one term of 16 bits
  int32_t last_block;  // of a head's queries: the launch's first, since it has most to do
};

/** Queries of a kv head before the `count` queries of this thread block. */
__device__ __forceinline__ int64_t exact_first_query(const ExactParameters& p, int count) {
  return (int64_t(p.last_block) - blockIdx.x) * count;
}

/** One query of a kv head; the queries of a head are numbered token by token. */
struct ExactQuery {
  int64_t token, query_head;
  int limit;  // rows it sees; 0: there is no such query

  /** Index: in 32 bits the quotient is a tenth of the instructions; a GPU holds no more queries. */
  template <typename Index>
  __device__ __forceinline__ ExactQuery(const ExactParameters& p, int head, Index index) {
    token = index / Index(p.group);
    query_head = int64_t(head) * p.group + index % Index(p.group);
    limit = token < p.tokens ? int(p.total - p.tokens + token + 1) : 0;
  }
  template <typename Element>
  __device__ __forceinline__ const Element* input(const ExactParameters& p) const {
    return reinterpret_cast<const Element*>(p.q) + token * p.q_stride_i + query_head * p.q_stride_j;
  }
  template <typename Element>
  __device__ __forceinline__ Element* output(const ExactParameters& p) const {
    return reinterpret_cast<Element*>(p.out) + token * p.out_stride_i + query_head * p.out_stride_j;
  }
};

/**
 * The rows of a thread block: its share of the launch's, as far as its last query sees. Shares take
 * turns at so many rows, wherever a launch begins: so it makes no difference to a result which rows
 * came in one launch.
 */
struct ExactRows {
  static constexpr int kTurn = 256;
  int first, end;

  __device__ __forceinline__ ExactRows(const ExactParameters& p, int64_t last_query) {
    const int turn = int(p.begin) / kTurn, share = int(blockIdx.z);
    const int ahead = (share + p.shares - turn % p.shares) % p.shares;
    first = ahead == 0 ? int(p.begin) : (turn + ahead) * kTurn;
    end = int(min(p.end, p.total - p.tokens + last_query / p.group + 1));
  }
  __device__ __forceinline__ bool empty() const { return first >= end; }
  /** The tile after the one at `row`; it may lie beyond the end. */
  __device__ __forceinline__ int next(const ExactParameters& p, int row, int tile) const {
    return (row + tile) % kTurn == 0 ? row + tile + (p.shares - 1) * kTurn : row + tile;
  }
};

/**
 * A query's state: the maximum, sums of four lanes, one float to align, then kDim weighted sums.
 * As many bits as in registers, so that it makes no difference that it was here.
 */
constexpr int kStateWeighted = 6;
__device__ __forceinline__ float* exact_state(const ExactParameters& p, int64_t share,
                                              int64_t heads, int64_t head, int64_t query,
                                              int dims) {
  return p.states + ((share * heads + head) * p.tokens * p.group + query) * (dims + kStateWeighted);
}

/** Where row `first` of a kv head begins; the rest of its segment follows. */
__device__ __forceinline__ const char* exact_rows(const ExactParameters& p, int head, int first,
                                                  int row_bytes) {
  const int segment = first / p.segment_tokens, slot = first - segment * p.segment_tokens;
  const char* of_segment =
      p.staged == nullptr
          ? static_cast<const char*>((*p.rows)[segment])
          : p.staged + (segment - p.staged_segment) * gridDim.y * p.segment_tokens * row_bytes;
  return row_of_segment(of_segment, head, p.segment_tokens, slot, row_bytes);
}

/**
 * Starts to copy rows [first, first + kRows) of a kv head, K and V side by side, to rows `kPitch`
 * bytes apart; zeros from `end` on. A tile never crosses a segment's border. With kPadded, K and V
 * have fewer dimensions than kDim each, and zeros follow.
 */
template <typename Element, int kDim, bool kPadded, int kRows, int kPitch, int kThreads>
__device__ __forceinline__ void stage_rows(const ExactParameters& p, int head, int first, int end,
                                           uint32_t target) {
  constexpr int kSize = int(sizeof(Element)), kChunks = 2 * kDim * kSize / 16;
  const int row_bytes = (kPadded ? p.key_dim + p.value_dim : 2 * kDim) * kSize;
  const char* rows = exact_rows(p, head, first, row_bytes);
#pragma unroll
  for (int step = 0; step < (kRows * kChunks + kThreads - 1) / kThreads; ++step) {
    const int i = step * kThreads + int(threadIdx.x), row = i / kChunks, chunk = i % kChunks;
    if (kRows * kChunks % kThreads != 0 && row >= kRows) break;
    const uint32_t to = target + row * kPitch + chunk * 16;
    if constexpr (kPadded) {
      const bool value = chunk >= kChunks / 2;
      const int own = (value ? chunk - kChunks / 2 : chunk) * 16;
      const char* from = rows + row * row_bytes + (value ? p.key_dim * kSize : 0) + own;
      const bool there = own < (value ? p.value_dim : p.key_dim) * kSize;
      ptx::cp_async_cg_16(to, from, there && first + row < end);
    } else {
      ptx::cp_async_cg_16(to, rows + i * 16, first + row < end);
    }
  }
  ptx::cp_async_commit_group();
}

__device__ __forceinline__ float capped(float logit, float softcap) {
  return softcap > 0 ? softcap * tanhf(logit / softcap) : logit;
}

/** Writes a query's log-sum-exp, if wanted, and returns the scale of its weighted sum.
 */
__device__ __forceinline__ float finish(const ExactParameters& p, const ExactQuery& query,
                                        float maximum, float sum, bool writes) {
  float lse = sum > 0 || sum != sum ? maximum + logf(sum) : -infinity();
  if (p.sink_bias != nullptr) {
    const float bias = p.sink_bias[query.query_head], top = larger(lse, bias);
    if (top != -infinity()) lse = top + logf(expf(lse - top) + expf(bias - top));
    sum = sum + expf(bias - maximum);
  }
  if (writes && p.lse != nullptr) p.lse[query.token * p.lse_stride + query.query_head] = lse;
  return lse == -infinity() || maximum == -infinity() ? 0.0f : 1.0f / sum;
}

}  // namespace pariskv::cuda::device
