// Which rows stand for the keys that a search has not selected.
#include "tail.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/numerics.h"
#include "cpu/pariskv/search.h"
#include "cpu/rows.h"

namespace pariskv::cpu {

void ParisKVSearch::list_tail(const SearchArgs& args) {
  const ModelShape& shape = args.shape();
  const SummaryLayout layout = args.layout();
  const int64_t width = args.running.selection.tail_width;
  if (width == 0) return;
  const auto is_finite = [&](const SequenceView& sequence, int64_t head, int64_t position) {
    float key[kMaxHeadDim];
    read_key_at(device_.kernels, shape, sequence, head, position, key);
    return std::all_of(key, key + shape.rows.key_dim, [](float x) { return std::isfinite(x); });
  };
  const int64_t tasks = int64_t(args.items.size()) * shape.kv_heads;
  // Drawn once for all heads, which share the work: for each head they cost 3 % of a step.
  device_.pool.parallel_for(tasks, [&](int64_t task) {
    const SearchItem& item = args.items[task / shape.kv_heads];
    const int64_t share = task % shape.kv_heads, end = item.tail.count;
    for (int64_t i = end * share / shape.kv_heads; i < end * (share + 1) / shape.kv_heads; ++i) {
      item.tail_position[i] = int32_t(item.tail.position(i));
    }
  });
  device_.pool.parallel_for(tasks, [&](int64_t task) {
    const SearchItem& item = args.items[task / shape.kv_heads];
    const int64_t head = task % shape.kv_heads;
    uint8_t* selected = item.tail_selected + head * width;
    std::fill_n(selected, item.tail.count, uint8_t{0});
    for (int64_t i = 0; i < item.selected_count[head]; ++i) {
      const int64_t position = item.selected[head * args.rules().top_k + i];
      if (item.tail.has(position)) selected[item.tail.number(position)] = 1;
    }
    int32_t* out = item.tail_number + head * width;
    int64_t count = 0;
    for (int64_t i = 0; i < item.tail.count; ++i) {
      const int64_t position = item.tail_position[i];
      uint8_t* segment = item.sequence.summaries[position / shape.segment_tokens];
      // A key that a search cannot select counts all the same, unless it is not finite.
      const bool found = *layout.norms(segment, head, position % shape.segment_tokens) != 0;
      if (selected[i] != 0 || (!found && !is_finite(item.sequence, head, position))) continue;
      out[count++] = int32_t(i);
    }
    item.tail_count[head] = count;
  });
}

namespace {

/** One half, K or V, of the rows of a head. */
struct Halves {
  const Kernels& kernels;
  const ModelShape& shape;
  const TailCopyJob& job;
  int64_t head;
  char* RowPlace::* half;
  RowType type;
  int64_t dim;
  CommonPart common;

  /** Of row `number` of the tail, as floats. */
  void read(int64_t number, float* out) const {
    const RowPlace row = row_at(shape, job.sequence, head, job.tail.position(number));
    kernels.to_float(row.*half, type, dim, out);
  }

  /** See loudness_of. */
  int loudness(int64_t number) const {
    float x[kMaxHeadDim], largest = 0;
    read(number, x);
    for (int64_t d = 0; d < dim; ++d) {
      if (std::isfinite(x[d])) largest = std::max(largest, std::fabs(x[d]));
    }
    return loudness_of(bits_of(largest));
  }

  /** Sets their common part, from the first `count` of them. */
  void set_common(int64_t count) const {
    uint8_t loud[kMostCommonRows], sorted_rows[kMostCommonRows];
    for (int64_t i = 0; i < count; ++i) loud[i] = uint8_t(loudness(i));
    std::copy_n(loud, count, sorted_rows);
    std::nth_element(sorted_rows, sorted_rows + count / 2, sorted_rows + count);
    const int median = count > 0 ? sorted_rows[count / 2] : 0;
    double sums[kMaxHeadDim] = {}, squares[kMaxHeadDim] = {};
    int64_t counts[kMaxHeadDim] = {};
    for (int64_t strand = 0; strand < kCommonStrands; ++strand) {
      double own_sums[kMaxHeadDim] = {}, own_squares[kMaxHeadDim] = {};
      for (int64_t i = strand; i < count; i += kCommonStrands) {
        if (!is_common(loud[i], median)) continue;
        float x[kMaxHeadDim];
        read(i, x);
        for (int64_t d = 0; d < dim; ++d) {
          if (!std::isfinite(x[d])) continue;
          own_sums[d] = own_sums[d] + double(x[d]);
          own_squares[d] = own_squares[d] + double(x[d]) * double(x[d]);
          ++counts[d];
        }
      }
      for (int64_t d = 0; d < dim; ++d) {
        sums[d] = sums[d] + own_sums[d];
        squares[d] = squares[d] + own_squares[d];
      }
    }
    int exponents[kMaxHeadDim];
    for (int64_t d = 0; d < dim; ++d) {
      const double number = double(std::max<int64_t>(counts[d], 1)), mean = sums[d] / number;
      common.centre[d] = float(mean);
      const double variance = std::max(squares[d] / number - mean * mean, 0.0);
      uint64_t bits;
      std::memcpy(&bits, &variance, sizeof bits);
      exponents[d] = exponent_of_root(bits);
    }
    int sorted[kMaxHeadDim];
    std::copy_n(exponents, dim, sorted);
    std::sort(sorted, sorted + dim);
    for (int64_t d = 0; d < dim; ++d) {
      common.unit[d] =
          std::ldexp(1.0f, exponent_of_unit(exponents[d], sorted[dim / 2], sorted[dim - 1]));
    }
  }

  /** Row `number` without it, in 8 bits. */
  void narrow(int64_t number, char* out) const {
    float x[kMaxHeadDim];
    read(number, x);
    const auto held = [](float y) { return std::clamp(y, -kMostApart, kMostApart); };
    for (int64_t d = 0; d < dim; ++d) {
      if (!std::isfinite(x[d])) continue;
      x[d] = held(held(x[d] - common.centre[d]) * (1.0f / common.unit[d]));
    }
    kernels.to_int8(x, RowType::kFloat32, dim, out);
  }
};

}  // namespace

void ParisKVSearch::copy_tail_rows(const TailCopyArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  const TailCopies copies = shape.tail_copies(Tail::capacity(needs_.tail_rows));
  const RowFormat& rows = shape.zone_rows();
  for (int64_t i = 0; i < args.batch; ++i) {
    const TailCopyJob& job = args.jobs[i];
    char* const block = job.sequence.tail_copies;
    device_.pool.parallel_for(shape.kv_heads, [&](int64_t head) {
      if (!copies.centred) {
        for (int64_t number = job.from; number < job.tail.count; ++number) {
          copy_row(rows, row_at(shape, job.sequence, head, job.tail.position(number)),
                   tail_copy(shape, copies, block, head, number));
        }
        return;
      }
      const Halves keys{device_.kernels, shape,    job,          head,
                        &RowPlace::key,  rows.key, rows.key_dim, copies.of_keys(block, head)};
      const Halves values{device_.kernels,
                          shape,
                          job,
                          head,
                          &RowPlace::value,
                          rows.value,
                          rows.value_dim,
                          copies.of_values(block, head)};
      for (const Halves& halves : {keys, values}) {
        if (job.from == 0) halves.set_common(common_rows(job.tail.count, needs_.tail_rows));
        for (int64_t number = job.from; number < job.tail.count; ++number) {
          halves.narrow(number, tail_copy(shape, copies, block, head, number).*halves.half);
        }
      }
    });
  }
}

}  // namespace pariskv::cpu
