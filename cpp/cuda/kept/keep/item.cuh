/**
 * A choice of one kv head on the device. Its rows to choose from are numbered: those that were kept
 * or held, then those that are new, which is in the order of their positions. Or they are listed by
 * position. What the kernels of a choice leave for one another lies in the head's scratch
 * (ChoiceScratch).
 */
#pragma once

#include "device/stored_rows.cuh"
#include "kept/blocks.cuh"
#include "kept/keep/params.h"

namespace pariskv::cuda {

/** The first numbers of a head. */
struct ChosenHead {
  int32_t count;      // rows to choose from
  int32_t kept;       // of them, those that were kept or held
  int32_t has_query;  // some query is finite
};

/** A head of a query. */
struct alignas(16) QueryHead {
  float unit;           // of RecentScale
  int32_t most;         // the same; kNoCap
  int32_t offset;       // logit of the reference, in steps
  int32_t visible_end;  // causal limit; 0: the query is not finite
};

/** Queries that are multiplied together; arrays of query heads and of packed queries are whole ones
 * of these. */
constexpr int64_t kQueriesAtOnce = 16;
constexpr int64_t padded_queries(int64_t queries) {
  return (queries + kQueriesAtOnce - 1) / kQueriesAtOnce * kQueriesAtOnce;
}
/** Bytes of one in 8 bits: whole instructions. */
constexpr int64_t packed_bytes(int64_t key_dim) { return (key_dim + 31) / 32 * 32; }

/** A logit has no cap: above any sum of its parts. */
constexpr int32_t kNoCap = 1 << 29;

constexpr uint8_t kNewcomer = 255;  // the age of a row that was not kept before

/** How many of some ascending positions are smaller. */
__device__ __forceinline__ int smaller_than(const int32_t* positions, int count, int position) {
  int first = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool right = positions[first + half] < position;
    first = right ? first + half + 1 : first;
    count = right ? count - half - 1 : half;
  }
  return first;
}

/** A kv head of one of the jobs. */
struct ChoiceItem {
  const ChoiceCall& call;
  const ChoiceJob& job;
  const device::SegmentDivisor& by_segment;
  int head;
  char* space;

  __device__ __forceinline__ ChoiceItem(const ChoiceParams& params, int index)
      : call(params.call),
        job(params.call.jobs[params.by_heads(index)]),
        by_segment(params.by_segment),
        head(int(call.first_head) + index - int(params.by_heads(index)) * int(call.heads)),
        space(call.space + index * call.scratch.bytes) {}

  template <typename T>
  __device__ __forceinline__ T* at(int64_t offset) const {
    return reinterpret_cast<T*>(space + offset);
  }
  __device__ __forceinline__ ChosenHead* numbers() const {
    return at<ChosenHead>(call.scratch.head);
  }
  __device__ __forceinline__ float* reference() const { return at<float>(call.scratch.reference); }
  __device__ __forceinline__ QueryHead* query_heads() const {
    return at<QueryHead>(call.scratch.query_heads);
  }
  /** (groups of queries, instructions, lanes) four words of a product's first operand. */
  __device__ __forceinline__ uint4* packed() const { return at<uint4>(call.scratch.packed); }
  __device__ __forceinline__ int32_t* listed() const { return at<int32_t>(call.scratch.listed); }
  __device__ __forceinline__ int32_t* sources() const { return at<int32_t>(call.scratch.sources); }
  /** Of the query of position number i, all rows'. */
  __device__ __forceinline__ int32_t* logits(int i) const {
    return at<int32_t>(call.scratch.logits) + i * call.scratch.width;
  }
  __device__ __forceinline__ uint64_t* reciprocals() const {
    return at<uint64_t>(call.scratch.reciprocals);
  }
  __device__ __forceinline__ uint8_t* usable() const { return at<uint8_t>(call.scratch.usable); }
  __device__ __forceinline__ uint64_t* shares() const { return at<uint64_t>(call.scratch.shares); }
  __device__ __forceinline__ uint64_t* ranks() const { return at<uint64_t>(call.scratch.ranks); }
  __device__ __forceinline__ int32_t* picked() const { return at<int32_t>(call.scratch.picked); }

  __device__ __forceinline__ int positions_asked() const {
    return int(job.asked.end - job.asked.begin);
  }
  __device__ __forceinline__ device::KeptHead before() const {
    return {job.before, call.shape.kept(job.before_capacity), head};
  }
  __device__ __forceinline__ device::KeptHead after() const {
    return {job.after, call.shape.kept(job.after_capacity), head};
  }

  /** Of a row's number; `kept` as in ChosenHead. */
  __device__ __forceinline__ int position(int row, int kept) const {
    if (call.scratch.listed != 0) return listed()[row];
    return row < kept ? before().positions()[sources()[row]] : int(job.added) + row - kept;
  }
  __device__ __forceinline__ int age(int row, int kept) const {
    return row < kept ? before().ages()[sources()[row]] : kNewcomer;
  }
  /** Where the row of a position lies in the store. */
  __device__ __forceinline__ const char* stored(int position) const {
    return device::row_of(job.sequence->rows, by_segment, int(call.shape.segment_tokens), head,
                          position, call.shape.rows.bytes());
  }
  /** Where it lies: with the rows that were kept, or in the store. */
  __device__ __forceinline__ const char* row(int row, int kept) const {
    if (call.scratch.listed != 0) {
      const int source = sources()[row];
      return source >= 0 ? before().row(source) : stored(listed()[row]);
    }
    return row < kept ? before().row(sources()[row]) : stored(int(job.added) + row - kept);
  }
};

}  // namespace pariskv::cuda
