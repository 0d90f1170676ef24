// What keys have in common is taken off before they are encoded: a mean per block of neighbours,
// and the balance of channels. The formulas are in policy/pariskv/codec/block_means.h.
#include "policy/pariskv/codec/block_means.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/pariskv/block_means.h"
#include "cpu/pariskv/search.h"
#include "cpu/rows.h"

namespace pariskv::cpu {

namespace {

/** Calls `visit(key)` for the keys at [begin, end) that are finite, in order; returns how many. */
template <typename Visit>
int64_t each_finite_key(const Kernels& kernels, const ModelShape& shape,
                        const SequenceView& sequence, int64_t head, int64_t begin, int64_t end,
                        Visit visit) {
  const int64_t dim = shape.rows.key_dim;
  float key[kMaxHeadDim];
  int64_t count = 0;
  for (int64_t position = begin; position < end; ++position) {
    read_key(kernels, shape.rows, plain_row_at(shape, sequence, head, position).key, key);
    float worst = 0;  // 0 times what is not finite is NaN
    for (int64_t c = 0; c < dim; ++c) worst += key[c] * 0.0f;
    if (worst != 0) continue;
    visit(key);
    ++count;
  }
  return count;
}

/** The mean of the finite keys at [begin, end), all zero without any; returns their number. */
int64_t mean_of(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
                int64_t head, int64_t begin, int64_t end, double* mean) {
  const int64_t dim = shape.rows.key_dim;
  std::fill_n(mean, dim, 0.0);
  const int64_t count =
      each_finite_key(kernels, shape, sequence, head, begin, end, [&](const float* key) {
        for (int64_t c = 0; c < dim; ++c) mean[c] = mean[c] + double(key[c]);
      });
  for (int64_t c = 0; count > 0 && c < dim; ++c) mean[c] = mean[c] / double(count);
  return count;
}

/** The balance of one head. */
void balance_head(const Kernels& kernels, const EncodeArgs& args, const EncodeJob& job,
                  int64_t head) {
  const ModelShape& shape = args.shape;
  const int64_t block = args.codec->layout.block;
  const int64_t dim = shape.rows.key_dim;
  double mean[kMaxHeadDim], keys[kMaxHeadDim] = {}, queries[kMaxHeadDim], centre[kMaxHeadDim] = {};
  double own_keys[kMaxHeadDim], own_centre[kMaxHeadDim];  // of a block: a GPU has many at once
  int64_t count = 0;
  for (int64_t begin = job.begin; begin < job.opening; begin += block - begin % block) {
    const int64_t end = begin - begin % block + block;
    mean_of(kernels, shape, job.sequence, head, begin, end, mean);
    std::fill_n(own_keys, dim, 0.0);
    std::fill_n(own_centre, dim, 0.0);
    count += each_finite_key(kernels, shape, job.sequence, head, begin, end, [&](const float* key) {
      for (int64_t c = 0; c < dim; ++c) {
        const double left = double(key[c]) - mean[c];
        own_keys[c] = std::fma(left, left, own_keys[c]);
        own_centre[c] = own_centre[c] + double(key[c]);
      }
    });
    for (int64_t c = 0; c < dim; ++c) {
      keys[c] = keys[c] + own_keys[c];
      centre[c] = centre[c] + own_centre[c];
    }
  }
  for (int64_t c = 0; count > 0 && c < dim; ++c) keys[c] = keys[c] / double(count);

  // Half a head apart are channels that a rotation of positions may turn into one another.
  double squares[kMaxHeadDim] = {}, paired[kMaxHeadDim];
  for (int64_t window = 0; window < job.query_windows; ++window) {
    const float* own = job.balance.query_squares + (window * shape.kv_heads + head) * dim;
    for (int64_t c = 0; c < dim; ++c) squares[c] = squares[c] + double(own[c]);
  }
  for (int64_t c = 0; c < dim; ++c) {
    queries[c] = squares[c] + squares[(c + dim / 2) % dim];
    paired[c] = keys[c] + keys[(c + dim / 2) % dim];
  }
  float* gain = job.balance.gain + head * dim;
  set_stretch(paired, job.query_windows > 0 ? queries : nullptr, dim,
              job.balance.stretch + head * dim, gain);

  double largest = 0;
  for (int64_t c = 0; count > 0 && c < dim; ++c) {
    centre[c] = centre[c] / double(count) * double(gain[c]);
    largest = std::max(largest, std::fabs(centre[c]));
  }
  const float step = centre_step(largest);
  job.balance.centre_step[head] = step;
  for (int64_t c = 0; c < dim; ++c) {
    job.balance.centre[head * dim + c] = centre_level(centre[c], step);
  }
}

}  // namespace

void set_balance(ThreadPool& pool, const Kernels& kernels, const EncodeArgs& args,
                 const EncodeJob& job) {
  pool.parallel_for(args.shape.kv_heads,
                    [&](int64_t head) { balance_head(kernels, args, job, head); });
}

void store_mean(const Kernels& kernels, const EncodeArgs& args, const EncodeJob& job, int64_t head,
                int64_t begin, int64_t end, float* gain, float* shift) {
  const ModelShape& shape = args.shape;
  const int64_t dim = shape.rows.key_dim;
  const SummaryLayout layout = args.codec->layout;
  uint8_t* segment = job.sequence.summaries[begin / shape.segment_tokens];
  const int64_t number = begin % shape.segment_tokens / layout.block;
  double mean[kMaxHeadDim];
  const int64_t count = mean_of(kernels, shape, job.sequence, head, begin, end, mean);
  std::fill_n(gain, layout.rotated_dim, 0.0f);
  std::fill_n(shift, layout.rotated_dim, 0.0f);
  std::memcpy(gain, job.balance.gain + head * dim, size_t(dim) * sizeof(float));
  const int16_t* centre = job.balance.centre + head * dim;
  const float centre_step = job.balance.centre_step[head];
  double largest = 0;
  for (int64_t c = 0; count > 0 && c < dim; ++c) {
    mean[c] = mean[c] * double(gain[c]) - double(centre[c]) * double(centre_step);
    largest = std::max(largest, std::fabs(mean[c]));
  }
  const float step = mean_step(largest);
  int8_t* levels = layout.means(segment, head, number);
  std::memset(levels, 0, size_t(layout.rotated_dim));
  for (int64_t c = 0; c < dim; ++c) {
    levels[c] = mean_level(mean[c], step);
    shift[c] = -(float(levels[c]) * step) - float(centre[c]) * centre_step;
  }
  *layout.steps(segment, head, number) = step;
}

void ParisKVSearch::add_queries(const ObserveArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  const int64_t dim = shape.rows.key_dim;
  device_.pool.parallel_for(args.batch * shape.kv_heads, [&](int64_t task) {
    const ObserveJob& job = args.jobs[task / shape.kv_heads];
    const int64_t head = task % shape.kv_heads;
    float* squares = job.squares + head * dim;
    if (job.first) std::fill_n(squares, dim, 0.0f);
    float query[kMaxHeadDim];
    for (int64_t i = 0; i < job.q.shape[0]; ++i) {
      for (int64_t g = 0; g < shape.group; ++g) {
        read_query(device_.kernels, shape, job.q, i, head * shape.group + g, query);
        for (int64_t c = 0; c < dim; ++c) squares[c] = squares[c] + query[c] * query[c];
      }
    }
  });
}

}  // namespace pariskv::cpu
