// Attention: the resident part, the selected part, and all of it.
#include <algorithm>
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/narrow_rows.h"
#include "cpu/numerics.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "cpu/step.h"

namespace pariskv::cpu {

namespace {

// Queries that share one pass over the rows: a tile of rows is turned to floats once for all.
constexpr int64_t kQueryBlock = 32;
// Row pointers gathered at a time; a multiple of the tile, so that tiles stay where they were.
constexpr int64_t kPointers = 16 * kAttendTile;

/** Some queries of one kv head, as floats, with their running softmax. */
struct QueryBlock {
  int64_t count = 0;
  alignas(64) float query[kQueryBlock * kMaxHeadDim];  // a vector must not cross a cache line
  int64_t limits[kQueryBlock];
  const float* shift = nullptr;  // of each query's logits, before they are capped; null: none
  float* maximum = nullptr;
  float* sum = nullptr;
  float* weighted = nullptr;
  float* squares = nullptr;
};

/**
 * Continues the running softmax of a block over rows [first, rows) of a format, whose places
 * `row(i)` gives; query q sees rows up to limits[q]. Without a pool the call is not told to stop
 * meanwhile.
 */
template <typename Row>
void attend_rows(ThreadPool* pool, const Kernels& kernels, const RowFormat& format,
                 const Logits& logits, const QueryBlock& block, int64_t first, int64_t rows,
                 Row row) {
  const void* keys[kPointers];
  const void* values[kPointers];
  int64_t limits[kQueryBlock];
  alignas(64) float scratch[kAttendTile * kMaxHeadDim];
  for (int64_t begin = first; begin < rows; begin += kPointers) {
    if (begin > first && pool != nullptr) pool->check_stop();  // a million rows take half a second
    const int64_t count = std::min(kPointers, rows - begin);
    for (int64_t i = 0; i < count; ++i) {
      const RowPlace place = row(begin + i);
      keys[i] = place.key;
      values[i] = place.value;
    }
    for (int64_t q = 0; q < block.count; ++q) limits[q] = block.limits[q] - begin;
    kernels.attend({keys, values, count, format.key, format.value, format.key_dim, format.value_dim,
                    block.count, block.query, limits, logits.scale, logits.softcap, block.shift,
                    block.maximum, block.sum, block.weighted, scratch, block.squares});
  }
}

/** The same over narrow rows, at positions `position(i)`. */
template <typename Position>
void attend_narrow(ThreadPool* pool, const Kernels& kernels, const ModelShape& shape,
                   const Logits& logits, const QueryBlock& block, const SequenceView& sequence,
                   int64_t head, int64_t first, int64_t end, Position position) {
  NarrowRows rows(kernels, shape, sequence, head);
  if (!rows.based()) {
    return attend_rows(pool, kernels, shape.narrow, logits, block, first, end, [&](int64_t i) {
      return narrow_row_at(shape, sequence, head, position(i));
    });
  }
  const int64_t key_dim = shape.rows.key_dim, value_dim = shape.rows.value_dim;
  const RowFormat floats = RowFormat::plain(key_dim, value_dim, DType::kFloat32);
  constexpr int64_t kRows = 32;
  alignas(64) float keys[kRows * kMaxHeadDim], values[kRows * kMaxHeadDim];
  const auto row = [&](int64_t i) -> RowPlace {
    const int64_t at = (i - first) % kRows;
    return {reinterpret_cast<char*>(keys + at * key_dim),
            reinterpret_cast<char*>(values + at * value_dim)};
  };
  for (int64_t begin = first; begin < end; begin += kRows) {
    if (pool != nullptr && (begin - first) % kPointers == 0) pool->check_stop();
    const int64_t stop = std::min(begin + kRows, end);
    for (int64_t i = begin; i < stop; ++i) {
      rows.read_key(position(i), keys + (i - begin) * key_dim);
      rows.read_value(position(i), values + (i - begin) * value_dim);
    }
    attend_rows(nullptr, kernels, floats, logits, block, begin, stop, row);
  }
}

/** The same over the first rows of a sequence, of which those of the zone may be narrow. */
void attend_all(ThreadPool& pool, const Kernels& kernels, const ModelShape& shape,
                const Logits& logits, const QueryBlock& block, const SequenceView& sequence,
                int64_t head, int64_t rows) {
  const auto row = [&](int64_t i) { return plain_row_at(shape, sequence, head, i); };
  const int64_t begin = shape.narrows() ? std::min(sequence.zone_begin, rows) : rows;
  const int64_t end = shape.narrows() ? std::min(sequence.zone_end, rows) : rows;
  attend_rows(&pool, kernels, shape.rows, logits, block, 0, begin, row);
  attend_narrow(&pool, kernels, shape, logits, block, sequence, head, begin, end,
                [](int64_t i) { return i; });
  attend_rows(&pool, kernels, shape.rows, logits, block, end, rows, row);
}

/** Queries [first, first + count) of the group of one kv head of one token. */
struct GroupPart {
  int64_t token, head, first, count;
};

enum class Stops { kYes, kNo };

/** Calls `visit(sequence, part)` for all queries of a step, at most a block at a time. */
template <typename Visit>
void each_group(ThreadPool& pool, Stops stops, const DecodeArgs& args, Visit visit) {
  const ModelShape& shape = args.shape;
  const int64_t blocks = (shape.group + kQueryBlock - 1) / kQueryBlock;
  const int64_t tasks = args.batch * shape.kv_heads * blocks;
  const auto work = [&](int64_t task) {
    const int64_t first = task % blocks * kQueryBlock;
    const int64_t token = task / blocks / shape.kv_heads;
    visit(args.sequences[token], GroupPart{token, task / blocks % shape.kv_heads, first,
                                           std::min(kQueryBlock, shape.group - first)});
  };
  if (stops == Stops::kYes) {
    pool.parallel_for(tasks, work);
  } else {
    pool.parallel_for_all(tasks, work);
  }
}

/** The queries of a part, over the running state kept between verbs; all see `rows` rows. */
void load_group(const DecodeArgs& args, const Running& state, const Kernels& kernels,
                const GroupPart& part, int64_t rows, QueryBlock& block) {
  const ModelShape& shape = args.shape;
  const int64_t query_head = part.head * shape.group + part.first;
  const int64_t running = part.token * shape.query_heads() + query_head;
  block.count = part.count;
  block.maximum = state.maximum + running;
  block.sum = state.sum + running;
  block.weighted = state.weighted + running * shape.rows.value_dim;
  for (int64_t q = 0; q < part.count; ++q) {
    read_query(kernels, shape, args.q, part.token, query_head + q,
               block.query + q * shape.rows.key_dim);
    block.limits[q] = rows;
  }
}

/** Rows that stand for others. */
struct TailRows {
  int64_t capacity;         // of the block that their copies are in
  const int32_t* position;  // of the tail's rows
  const int32_t* number;    // which of them
  int64_t count;            // how many
  float weight;             // of each
};

/** Queries for rows without their common part; see tail_copies.h. */
void take_common(const CommonPart& keys, int64_t dim, float scale, QueryBlock& block,
                 float* shift) {
  for (int64_t q = 0; q < block.count; ++q) {
    float* query = block.query + q * dim;
    shift[q] = dot(query, keys.centre, dim) * scale;
    for (int64_t d = 0; d < dim; ++d) query[d] = query[d] * keys.unit[d];
  }
  block.shift = shift;
}

/** Adds the common part to weighted sums of such rows' values. */
void give_common(const CommonPart& values, int64_t dim, const QueryBlock& block) {
  for (int64_t q = 0; q < block.count; ++q) {
    float* weighted = block.weighted + q * dim;
    for (int64_t d = 0; d < dim; ++d) {
      weighted[d] = std::fma(block.sum[q], values.centre[d], weighted[d] * values.unit[d]);
    }
  }
}

/** What they alone have: the largest logits, and sums of squared exponentials under these. */
struct TailSquares {
  float maximum[kQueryBlock], sum[kQueryBlock];
};

/** Adds them to the running softmax of a block. */
void attend_tail(const Kernels& kernels, const DecodeArgs& args, const QueryBlock& block,
                 const SequenceView& sequence, int64_t head, const TailRows& tail,
                 TailSquares* squares) {
  if (squares != nullptr) {
    std::fill_n(squares->maximum, block.count, -INFINITY);
    std::fill_n(squares->sum, block.count, 0.0f);
  }
  if (tail.count == 0) return;
  const ModelShape& shape = args.shape;
  const int64_t dim = shape.rows.value_dim;
  const TailCopies copies = shape.tail_copies(tail.capacity);
  char* const copied = sequence[Part::kTailCopies];
  float maximum[kQueryBlock], sum[kQueryBlock], shift[kQueryBlock];
  alignas(64) float weighted[kQueryBlock * kMaxHeadDim];
  QueryBlock own = block;
  own.maximum = maximum, own.sum = sum, own.weighted = weighted;
  if (squares != nullptr) own.squares = squares->sum;
  std::fill_n(maximum, own.count, -INFINITY);
  std::fill_n(sum, own.count, 0.0f);
  std::fill_n(weighted, own.count * dim, 0.0f);
  std::fill_n(own.limits, own.count, tail.count);
  if (copied != nullptr) {
    take_common(copies.of_keys(copied, head), shape.rows.key_dim, args.logits.scale, own, shift);
  }
  attend_rows(nullptr, kernels, shape.tail_rows(), args.logits, own, 0, tail.count, [&](int64_t i) {
    const int64_t number = tail.number[i];
    return copied != nullptr ? tail_copy(shape, copies, copied, head, number)
                             : plain_row_at(shape, sequence, head, tail.position[number]);
  });
  if (copied != nullptr) give_common(copies.of_values(copied, head), dim, own);
  if (squares != nullptr) std::copy_n(maximum, own.count, squares->maximum);
  for (int64_t q = 0; q < own.count; ++q) {
    const float top = std::max(block.maximum[q], maximum[q]);
    if (!(top > -INFINITY)) continue;
    const float before = std::exp(block.maximum[q] - top);
    const float added = tail.weight * std::exp(maximum[q] - top);
    block.maximum[q] = top;
    block.sum[q] = block.sum[q] * before + sum[q] * added;
    for (int64_t d = 0; d < dim; ++d) {
      float& value = block.weighted[q * dim + d];
      value = value * before + weighted[q * dim + d] * added;
    }
  }
}

struct Result {
  TensorView out, lse;
  int64_t token, query_head;
};

/**
 * Divides the running sums through, writes one query's output.
 * @return the share of all attention that e^maximum stands for. It is not made from the
 *         log-sum-exp: beside a maximum of 1e8 the logarithm of a sum has no bits.
 */
float finish(const ModelShape& shape, const Logits& logits, float maximum, float sum,
             float* weighted, const Result& to) {
  const float* bias = bias_of(logits, to.query_head);
  const float share = share_of_maximum(maximum, sum, bias);
  for (int64_t d = 0; d < shape.rows.value_dim; ++d) {
    // Of infinite values the order of a sum decides: outputs have no infinity, but NaN.
    const float value = weighted[d] * share;
    weighted[d] = value + value * 0.0f;
  }
  if (to.out.data != nullptr) {
    write_half(weighted, shape.rows.value_dim, row_type(shape.dtype),
               element_at(to.out, to.token, to.query_head));
  }
  if (to.lse.data != nullptr) {
    floats_of(to.lse, to.token)[to.query_head] = log_sum_exp(maximum, sum, bias);
  }
  return share;
}

}  // namespace

void Step::attend_resident(const DecodeArgs& args, const Running& running) {
  const ModelShape& shape = args.shape;
  each_group(device_.pool, Stops::kYes, args,
             [&](const SequenceView& sequence, const GroupPart& part) {
               // Before the zone, then after it; in a dense step the zone is resident like the
               // rest.
               const int64_t gap = sequence.dense() ? 0 : sequence.zone_tokens();
               // Rows that are kept of a zone that is left out lie together, and come in its place.
               const KeptLayout layout = shape.kept(sequence.kept_capacity);
               const bool keeps =
                   gap > 0 && sequence.kept_capacity > 0 && sequence[Part::kKept] != nullptr;
               const int64_t kept = keeps ? layout.counts(sequence[Part::kKept], part.head)[0] : 0;
               const int64_t kept_end = sequence.zone_begin + kept;
               const int64_t rows = sequence.total - gap + kept;
               QueryBlock block;
               load_group(args, running, device_.kernels, part, rows, block);
               std::fill_n(block.maximum, block.count, -INFINITY);
               std::fill_n(block.sum, block.count, 0.0f);
               std::fill_n(block.weighted, block.count * shape.rows.value_dim, 0.0f);
               attend_rows(&device_.pool, device_.kernels, shape.rows, args.logits, block, 0, rows,
                           [&](int64_t i) {
                             if (i >= sequence.zone_begin && i < kept_end) {
                               return kept_row(shape, layout, sequence[Part::kKept], part.head,
                                               i - sequence.zone_begin);
                             }
                             return plain_row_at(shape, sequence, part.head,
                                                 i < sequence.zone_begin ? i : i - kept + gap);
                           });
             });
}

void Step::attend_selected(const DecodeArgs& args, const Running& running) {
  const ModelShape& shape = args.shape;
  const Selection& selection = running.selection;
  each_group(
      device_.pool, Stops::kNo, args, [&](const SequenceView& sequence, const GroupPart& part) {
        const int64_t list = part.token * shape.kv_heads + part.head;
        const int64_t rows = sequence.dense() ? 0 : selection.count[list];
        QueryBlock block;
        load_group(args, running, device_.kernels, part, rows, block);
        const int32_t* selected = selection.position + list * selection.width;
        if (shape.narrows()) {
          attend_narrow(nullptr, device_.kernels, shape, args.logits, block, sequence, part.head, 0,
                        rows, [&](int64_t i) { return selected[i]; });
        } else {
          attend_rows(
              nullptr, device_.kernels, shape.rows, args.logits, block, 0, rows,
              [&](int64_t i) { return plain_row_at(shape, sequence, part.head, selected[i]); });
        }
        TailSquares squares;
        const bool has_tail = !sequence.dense() && selection.tail_width > 0;
        const bool weighs = has_tail && selection.tail_squares != nullptr;
        const float weight = has_tail ? selection.tail_weight[part.token] : 0;
        if (has_tail) {
          const int64_t width = selection.tail_width;
          attend_tail(device_.kernels, args, block, sequence, part.head,
                      {width, selection.tail_position + part.token * width,
                       selection.tail_number + list * width, selection.tail_count[list], weight},
                      weighs ? &squares : nullptr);
        }
        for (int64_t q = 0; q < block.count; ++q) {
          const int64_t query_head = part.head * shape.group + part.first + q;
          const float whole = finish(shape, args.logits, block.maximum[q], block.sum[q],
                                     block.weighted + q * shape.rows.value_dim,
                                     {args.out, args.lse, part.token, query_head});
          if (!weighs) continue;
          const float share =  // of the largest row
              weight * std::exp(squares.maximum[q] - block.maximum[q]) * whole;
          selection.tail_squares[part.token * shape.query_heads() + query_head] =
              squares.sum[q] * share * share;
        }
      });
}

void CpuBackend::attend_exact(const AttendExactArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  for (int64_t s = 0, packed = 0; s < args.batch; packed += args.lengths[s++]) {
    const SequenceView& sequence = args.sequences[s];
    const int64_t queries = args.lengths[s] * shape.group;  // per kv head, token by token
    const int64_t blocks = (queries + kQueryBlock - 1) / kQueryBlock;
    const int64_t before = sequence.total - args.lengths[s];

    pool_.parallel_for(shape.kv_heads * blocks, [&](int64_t task) {
      const int64_t head = task / blocks;
      const int64_t first = task % blocks * kQueryBlock;
      float maximum[kQueryBlock], sum[kQueryBlock];
      alignas(64) float weighted[kQueryBlock * kMaxHeadDim];
      QueryBlock block{};
      block.count = std::min(kQueryBlock, queries - first);
      block.maximum = maximum, block.sum = sum, block.weighted = weighted;
      std::fill_n(maximum, block.count, -INFINITY);
      std::fill_n(sum, block.count, 0.0f);
      std::fill_n(weighted, block.count * shape.rows.value_dim, 0.0f);
      const auto token_of = [&](int64_t q) { return (first + q) / shape.group; };
      const auto head_of = [&](int64_t q) {
        return head * shape.group + (first + q) % shape.group;
      };
      for (int64_t q = 0; q < block.count; ++q) {
        read_query(kernels_, shape, args.q, packed + token_of(q), head_of(q),
                   block.query + q * shape.rows.key_dim);
        block.limits[q] = before + token_of(q) + 1;
      }
      attend_all(pool_, kernels_, shape, args.logits, block, sequence, head,
                 block.limits[block.count - 1]);
      for (int64_t q = 0; q < block.count; ++q) {
        finish(shape, args.logits, maximum[q], sum[q], weighted + q * shape.rows.value_dim,
               {args.out, args.lse, packed + token_of(q), head_of(q)});
      }
    });
  }
}

void CpuBackend::exact_logits(const ExactLogitsArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  float query[kMaxHeadDim], key[kMaxHeadDim];
  for (int64_t query_head = 0; query_head < shape.query_heads(); ++query_head) {
    const int64_t head = query_head / shape.group;
    read_query(kernels_, shape, args.q, 0, query_head, query);
    for (int64_t i = 0; i < args.width; ++i) {
      const int32_t position = args.positions[head * args.width + i];
      if (position < 0) continue;
      read_key_at(kernels_, shape, args.sequence, head, position, key);
      args.out[query_head * args.width + i] =
          soft_capped(dot(query, key, shape.rows.key_dim) * args.logits.scale, args.logits.softcap);
    }
  }
}

}  // namespace pariskv::cpu
