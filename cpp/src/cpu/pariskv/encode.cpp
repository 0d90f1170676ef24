// Keys that enter a zone: summaries written, statistics added; and taken off when they leave.
#include <algorithm>

#include "cpu/pariskv/block_means.h"
#include "cpu/pariskv/common_part.h"
#include "cpu/pariskv/search.h"
#include "cpu/rows.h"

namespace pariskv::cpu {

namespace {

/** Calls `visit(first, count)` over [begin, end), within a segment and kTallyKeys at a time. */
template <typename Visit>
void each_run(int64_t begin, int64_t end, int64_t segment_tokens, Visit visit) {
  while (begin < end) {
    const int64_t segment_end = (begin / segment_tokens + 1) * segment_tokens;
    const int64_t stop = std::min({end, segment_end, begin + kTallyKeys});
    visit(begin, stop - begin);
    begin = stop;
  }
}

struct KeyRun {
  const uint8_t* signs;  // (count, subspaces)
  const uint8_t* norms;  // (count)
  int64_t count;         // at most kTallyKeys
};

/** Adds (direction 1) or takes off (-1) the share of a run of keys of one head. */
void tally_run(const Kernels& kernels, const KeyRun& run, const SummaryLayout& layout,
               const KeyStatistics& statistics, int64_t head, int64_t direction) {
  const int64_t subspaces = layout.subspaces();
  int32_t units[kTallyKeys];
  int64_t usable = 0, squares = 0, all_units = 0;
  for (int64_t i = 0; i < run.count; ++i) {
    units[i] = int32_t(norm_units(run.norms[i]));
    usable += units[i] != 0;
    squares += int64_t{units[i]} * units[i];
    all_units += units[i];
  }
  statistics.usable[head] += direction * usable;
  statistics.square_units[head] += direction * squares;

  if (statistics.sums == nullptr) return;
  // Signs are +1 and -1: the sum over both is twice that over the positive ones, less all.
  int32_t positive[kMaxRotatedDim] = {};
  kernels.tally(run.signs, units, run.count, subspaces, positive);
  int64_t* sums = statistics.sums + head * layout.rotated_dim;
  for (int64_t d = 0; d < layout.rotated_dim; ++d) {
    sums[d] += direction * (2 * int64_t{positive[d]} - all_units);
  }

  if (statistics.counts == nullptr) return;
  int32_t* counts = statistics.counts + head * subspaces * 256;
  for (int64_t i = 0; i < run.count; ++i) {
    if (units[i] == 0) continue;
    for (int64_t b = 0; b < subspaces; ++b) {
      counts[b * 256 + run.signs[i * subspaces + b]] += int32_t(direction);
    }
  }
}

void tally_jobs(ThreadPool& pool, const Kernels& kernels, const EncodeArgs& args,
                int64_t direction) {
  const ModelShape& shape = args.shape;
  const SummaryLayout layout = args.codec->layout;
  pool.parallel_for(args.batch * shape.kv_heads, [&](int64_t task) {
    const EncodeJob& job = args.jobs[task / shape.kv_heads];
    const int64_t head = task % shape.kv_heads;
    each_run(job.begin, job.end, shape.segment_tokens, [&](int64_t begin, int64_t count) {
      uint8_t* block = job.sequence.summaries[begin / shape.segment_tokens];
      const int64_t slot = begin % shape.segment_tokens;
      tally_run(kernels, {layout.signs(block, head, slot), layout.norms(block, head, slot), count},
                layout, job.statistics, head, direction);
    });
  });
}

/** Addresses of keys that are gathered at a time. */
constexpr int64_t kPointers = 256;

/** Keys [begin, end) of a segment. */
void encode_keys(const Kernels& kernels, const EncodeArgs& args, const EncodeJob& job, int64_t head,
                 int64_t begin, int64_t end, const float* gain, const float* shift) {
  const ModelShape& shape = args.shape;
  const SummaryLayout layout = args.codec->layout;
  uint8_t* segment = job.sequence.summaries[begin / shape.segment_tokens];
  const void* keys[kPointers];
  for (int64_t first = begin; first < end; first += kPointers) {
    const int64_t count = std::min(kPointers, end - first), slot = first % shape.segment_tokens;
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = plain_row_at(shape, job.sequence, head, first + i).key;
    }
    kernels.encode({keys, shape.rows.key, count, shape.rows.key_dim, layout.rotated_dim, gain,
                    shift, args.codec->rotation_signs.data(), args.codec->thresholds.data(),
                    args.codec->centres.data(), layout.signs(segment, head, slot),
                    layout.norms(segment, head, slot), layout.scales(segment, head, slot),
                    layout.records(segment, head, slot)});
  }
}

/** What V of narrow rows have in common, from the zone's first ones; from now on they have a base.
 */
void set_narrow_base(ThreadPool& pool, const Kernels& kernels, const EncodeArgs& args,
                     const EncodeJob& job) {
  const ModelShape& shape = args.shape;
  const NarrowLayout& layout = shape.narrow_base;
  char* const state = job.sequence[Part::kState];
  const int64_t dim = shape.rows.value_dim;
  pool.parallel_for(shape.kv_heads, [&](int64_t head) {
    const auto read = [&](int64_t i, float* out) {
      kernels.to_float(plain_row_at(shape, job.sequence, head, job.begin + i).value,
                       shape.rows.value, dim, out);
    };
    const Halves<decltype(read)> values{dim, read};
    values.set_common(std::min(job.opening - job.begin, kMostValueRows),
                      NarrowBase::values_of(layout, state, head));
  });
  *reinterpret_cast<int32_t*>(state + layout.based) = 1;
}

}  // namespace

void ParisKVSearch::encode(const EncodeArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  const int64_t block = args.codec->layout.block;
  for (int64_t j = 0; j < args.batch; ++j) {
    const EncodeJob& job = args.jobs[j];
    if (job.opening > 0) set_balance(device_.pool, device_.kernels, args, job);
    if (job.opening > 0 && shape.narrow_base.any()) {
      set_narrow_base(device_.pool, device_.kernels, args, job);
    }
    const int64_t first_segment = job.begin / shape.segment_tokens;
    const int64_t segments = (job.end - 1) / shape.segment_tokens - first_segment + 1;
    if (job.begin >= job.end) continue;
    device_.pool.parallel_for(segments * shape.kv_heads, [&](int64_t task) {
      const int64_t segment = first_segment + task / shape.kv_heads;
      const int64_t head = task % shape.kv_heads;
      const int64_t begin = std::max(job.begin, segment * shape.segment_tokens);
      const int64_t end = std::min(job.end, (segment + 1) * shape.segment_tokens);
      if (block == 0) {
        encode_keys(device_.kernels, args, job, head, begin, end, nullptr, nullptr);
        return;
      }
      float gain[kMaxRotatedDim], shift[kMaxRotatedDim];
      for (int64_t first = begin; first < end; first += block - first % block) {
        const int64_t last = std::min(first - first % block + block, end);
        store_mean(device_.kernels, args, job, head, first, last, gain, shift);
        encode_keys(device_.kernels, args, job, head, first, last, gain, shift);
      }
    });
  }
  tally_jobs(device_.pool, device_.kernels, args, 1);
}

void ParisKVSearch::forget(const EncodeArgs& args, Stream) {
  tally_jobs(device_.pool, device_.kernels, args, -1);
}

}  // namespace pariskv::cpu
