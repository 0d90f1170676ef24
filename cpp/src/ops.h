/**
 * One plain struct of arguments per verb: data that flows between the cache, a search and a
 * backend. Every pointer carries its shape. Checked already; backends trust them. The arguments
 * of one policy alone are in policy/.
 *
 * `heads` in a shape below means kv_heads, `zone` the retrieval tokens of a sequence.
 */
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/row_cache.h"
#include "kept.h"
#include "narrow.h"
#include "paged.h"
#include "pariskv/config.h"
#include "pariskv/tensor_view.h"
#include "part.h"
#include "recent.h"
#include "row_format.h"
#include "step_mode.h"
#include "tail.h"
#include "tail_copies.h"

namespace pariskv {

/** The sizes that never change in the life of a cache, whatever the policy. */
struct ModelShape {
  int64_t kv_heads;
  int64_t group;
  DType dtype;  // of queries, of outputs, and of new rows that are copied
  RowFormat rows;
  int64_t segment_tokens;   // of summaries; on a GPU of rows as well
  RowLayout layout;         // of stored rows, in the blocks of SequenceView::rows
  int64_t cached_rows = 0;  // fetched rows per kv head that stay on a GPU: slots; 0: none
  int64_t recent = 0;       // queries that are remembered, per layer and sequence; 0: none are
  RowFormat narrow{};  // of rows of a zone, if not `rows`; of no dimensions: they are as others
  RowLayout narrow_layout{};   // in the blocks of SequenceView::narrow_rows
  NarrowLayout narrow_base{};  // what is taken off them; a search says where it lies

  /** Tensors are stored as they are, in segments. */
  static constexpr ModelShape plain(int64_t kv_heads, int64_t group, DType dtype, int64_t key_dim,
                                    int64_t value_dim, int64_t segment_tokens) {
    const RowFormat rows = RowFormat::plain(key_dim, value_dim, dtype);
    return {kv_heads, group,          dtype,
            rows,     segment_tokens, RowLayout::segments(rows, segment_tokens)};
  }

  constexpr int64_t query_heads() const { return kv_heads * group; }
  /** The same with so many queries remembered. */
  constexpr ModelShape remembering(int64_t queries) const {
    ModelShape shape = *this;
    shape.recent = queries;
    return shape;
  }
  /** The same with rows of zones in 8 bits. */
  constexpr ModelShape narrowing() const {
    ModelShape shape = *this;
    shape.narrow = rows.narrowed();
    shape.narrow_layout = RowLayout::segments(shape.narrow, layout.tokens);
    return shape;
  }
  /** The same with blocks of so many rows, whatever is in a segment. */
  constexpr ModelShape in_blocks(int64_t tokens) const {
    ModelShape shape = *this;
    shape.layout = RowLayout::segments(rows, tokens);
    return shape;
  }
  /** The same with rows in the memory of the program. */
  constexpr ModelShape borrowing(const BorrowedRows& borrowed) const {
    ModelShape shape = *this;
    shape.rows = RowFormat::borrowed(rows.key_dim, rows.value_dim, borrowed);
    shape.layout = RowLayout::addresses(borrowed, layout.tokens);
    return shape;
  }
  constexpr bool narrows() const { return narrow.key_dim > 0; }
  /** How rows of a zone are stored. */
  constexpr const RowFormat& zone_rows() const { return narrows() ? narrow : rows; }
  /** How those of a tail are: narrow copies, but borrowed ones are read where they lie. */
  constexpr RowFormat tail_rows() const { return layout.borrowed ? rows : rows.narrowed(); }
  /** Of a block of rows, or of where borrowed ones lie. */
  int64_t row_block_bytes() const {
    return layout.tokens *
           (layout.borrowed ? int64_t(sizeof(RowAddress)) : kv_heads * rows.bytes());
  }
  int64_t narrow_block_bytes() const { return kv_heads * narrow_layout.tokens * narrow.bytes(); }
  constexpr RowCacheLayout row_cache() const {
    return {kv_heads, cached_rows, zone_rows().copied_bytes()};
  }
  constexpr RecentLayout recent_queries() const { return {recent, query_heads(), rows.key_dim}; }
  /** Copies of a tail's rows, at most `capacity` of each head. */
  constexpr TailCopies tail_copies(int64_t capacity) const {
    return {kv_heads, capacity, rows.key_dim, rows.value_dim, tail_rows().bytes()};
  }
  constexpr KeptLayout kept(int64_t capacity) const { return {kv_heads, capacity, rows.bytes()}; }
};

/** Of a resolved config, without the slots of its search. */
ModelShape shape_of(const Config& config);

/** With slots per kv head for rows that come over a bus, where any do. */
ModelShape with_row_cache(const ModelShape& shape, const Config& config, int64_t selected);

/** Positions [begin, end) of any sequence. */
struct Positions {
  int64_t begin, end;
};

/** Two words that a search sets for a zone of some size and that it alone reads, by its own type.
 */
struct SearchPlan {
  int64_t words[2];
};

/**
 * One layer of one sequence, as the verbs see it. A GPU has the same struct in its own memory,
 * with its own tables, and is told of changes word by word: every member takes 8 bytes.
 */
struct SequenceView {
  void* const* rows;          // (row blocks) -> (heads, layout.tokens) rows, see RowLayout
  uint8_t* const* summaries;  // (segments) -> a block of the policy's; null outside the zone
  int64_t total;              // tokens stored
  int64_t zone_begin;         // the retrieval zone, as positions
  int64_t zone_end;
  StepMode mode;             // of the next step
  SearchPlan plan;           // of the search, for a zone of this size
  char* parts[kPartCount];   // by Part; null: it is not there
  int64_t generation;        // of what the row cache may have: goes up when rows change under it
  uint64_t tail_seed;        // that rows of the tail are drawn by: 32 bits
  int64_t kept_capacity;     // of a head, of kept rows; 0: no rows are chosen to be kept
  SequenceView* device;      // the same in a GPU's memory; null: there is none
  void* const* narrow_rows;  // (row blocks) -> (heads, layout.tokens) rows of ModelShape::narrow,
                             // which are those of the zone; null: all are in `rows`

  constexpr char*& operator[](Part part) { return parts[int(part)]; }
  constexpr char* operator[](Part part) const { return parts[int(part)]; }

  int64_t zone_tokens() const { return zone_end - zone_begin; }
  /** Whether a step attends to all rows. */
  constexpr bool dense() const { return mode == StepMode::kDense; }
  /** Where the zone has narrow rows, and so a plain row need not be there. */
  bool narrow(int64_t position) const {
    return narrow_rows != nullptr && position >= zone_begin && position < zone_end;
  }
};

/** Numbers of float32, a row for each token. */
inline float* floats_of(const TensorView& view, int64_t first = 0) {
  if (view.data == nullptr) return nullptr;
  return static_cast<float*>(view.data) + first * view.strides[0];
}

/** Copies rows in (append) or out (read): packed tokens of several sequences. */
struct RowsArgs {
  ModelShape shape;
  int64_t batch;
  const SequenceView* sequences;     // (batch)
  const int64_t* begin;              // (batch) first position
  const int64_t* lengths;            // (batch)
  TensorView k, v;                   // (sum of lengths, heads, key_dim or value_dim)
  const PagedRows* paged = nullptr;  // of an append: rows of a page table that it fills
};

/** How logits are made of q.k. */
struct Logits {
  float scale;
  float softcap;           // 0: none
  const float* sink_bias;  // (query_heads); null: none
};

/** Bytes of one block of rows, from one memory to the other. */
struct RowCopy {
  void* target;
  const void* source;
  int64_t bytes;
};

/** Rows that enter or leave a zone where it has other ones: see ModelShape::narrow. */
struct NarrowJob {
  SequenceView sequence;
  Positions positions;
};

struct NarrowArgs {
  ModelShape shape;
  int64_t batch;
  const NarrowJob* jobs;  // (batch)
};

/** Exact causal attention of each sequence's last tokens over all of it. */
struct AttendExactArgs {
  ModelShape shape;
  int64_t batch;
  const SequenceView* sequences;       // (batch)
  const int64_t* lengths;              // (batch)
  const std::vector<int64_t>* hosted;  // (batch) segments with rows in host memory, ascending
  TensorView q;                        // (sum of lengths, query_heads, key_dim)
  Logits logits;
  TensorView out;  // (sum of lengths, query_heads, value_dim)
  TensorView lse;  // (sum of lengths, query_heads) float32; data null: not wanted
  Precision precision = Precision::kExact;  // a backend may add up more exactly than asked
};

/**
 * Rows of the tail of a sequence, from number `from` on, to be copied to its block of them. From
 * the first one on: their common part is set before.
 */
struct TailCopyJob {
  SequenceView sequence;
  Tail tail;
  int64_t from;
};

struct TailCopyArgs {
  ModelShape shape;
  int64_t batch;
  const TailCopyJob* jobs;  // (batch)
};

/** Queries of the positions from `begin` on, at most as many as are remembered. */
struct RememberJob {
  SequenceView sequence;
  int64_t begin;
  TensorView q;  // (positions, query_heads, key_dim)
};

struct RememberArgs {
  ModelShape shape;
  Logits logits;
  int64_t batch;
  const RememberJob* jobs;  // (batch)
};

/** A zone that grew or was cut, and what is to be kept of it. */
struct KeptChange {
  SequenceView before;  // `kept` null: nothing is kept of it
  SequenceView after;   // its block is to be filled
  Positions queries;    // that are remembered, if the zone grew; at least one
  bool whole;           // choose from all of the zone, not from what is kept and what is new
  bool trims = false;   // choose nothing: of the rows that were kept, those that a cut leaves stay

  bool cut() const { return after.zone_end < before.zone_end; }
  bool fresh() const { return whole || before[Part::kKept] == nullptr; }
};

/** One token of each of some sequences. */
struct DecodeArgs {
  ModelShape shape;
  int64_t layer;
  int64_t batch;
  const SequenceView* sequences;  // (batch) `total` counts the token
  TensorView q;                   // (batch, query_heads, key_dim)
  TensorView k, v;  // (batch, heads, key_dim or value_dim) the token's own row; data null: stored
  Logits logits;
  TensorView out;    // (batch, query_heads, value_dim); data null: not wanted
  TensorView lse;    // (batch, query_heads) float32; data null: not wanted
  TensorView error;  // (batch, heads) float32; data null: not wanted. See Needs::estimates_error
  bool traced;       // to be explained, beside whatever is being decoded
  /**
   * Of a `reserve`: slots that alone have changed since the last one, in the order of `sequences`,
   * which has theirs alone; null: all of the batch.
   */
  const std::vector<int64_t>* changed = nullptr;
  const PagedStep* paged = nullptr;  // what others attend to; null: nothing
};

struct DecodeCounts {
  int64_t candidates = 0;
  int64_t rows = 0;
  int64_t cached_rows = 0;  // of rows: found in the row cache
  // Where a policy estimates the error of a step.
  int64_t weighed = 0;      // searches of kv heads
  int64_t mass = 0;         // the sum of the shares of the attention of rows attended to exactly
  int64_t most_missed = 0;  // what one of them lacked
  int64_t error = 0;        // the sum of their errors
  int64_t worst = 0;        // of them

  /** All of the attention, an error of 1: those of 2^34 searches can be added up. */
  static constexpr int64_t kOne = 1 << 24;
};

/** Exact logits of chosen rows, for explanations. */
struct ExactLogitsArgs {
  ModelShape shape;
  SequenceView sequence;
  TensorView q;  // (1, query_heads, key_dim)
  Logits logits;
  const int32_t* positions;  // (heads, width) in the host's memory; -1: none
  int64_t width;
  float* out;  // (query_heads, width) in the host's memory
};

}  // namespace pariskv
