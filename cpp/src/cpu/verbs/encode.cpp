// Keys that enter a zone: summaries written, statistics added; and taken off when they leave.
#include "cpu/cpu_backend.h"

namespace pariskv::cpu {

namespace {

struct KeyRun {
  const uint8_t* signs;  // (count, subspaces)
  const uint8_t* norms;  // (count)
  int64_t count;
};

/** Adds (direction 1) or takes off (-1) what a run of keys of one head contributes. */
void tally(const KeyRun& run, const ModelShape& shape, const KeyStatistics& statistics,
           int64_t head, int64_t direction) {
  const int64_t subspaces = shape.subspaces();
  int64_t* sums = statistics.sums + head * shape.rotated_dim;
  int32_t* counts =
      statistics.counts == nullptr ? nullptr : statistics.counts + head * subspaces * 256;
  int64_t usable = 0, square_units = 0, all_units = 0;
  int64_t positive[256] = {};  // per rotated dimension: units of the keys whose sign is +
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t units = norm_units(run.norms[i]);
    if (units == 0) continue;
    ++usable;
    square_units += units * units;
    all_units += units;
    const uint8_t* signs = run.signs + i * subspaces;
    for (int64_t b = 0; b < subspaces; ++b) {
      for (int64_t j = 0; j < kSubspaceDim; ++j) {
        positive[b * kSubspaceDim + j] += units & -int64_t(signs[b] >> j & 1);
      }
      if (counts != nullptr) counts[b * 256 + signs[b]] += int32_t(direction);
    }
  }
  statistics.usable[head] += direction * usable;
  statistics.square_units[head] += direction * square_units;
  for (int64_t d = 0; d < shape.rotated_dim; ++d) {
    sums[d] += direction * (2 * positive[d] - all_units);
  }
}

void tally_jobs(ThreadPool& pool, const EncodeArgs& args, int64_t direction) {
  const ModelShape& shape = args.shape;
  const SummaryLayout layout = shape.summary();
  pool.parallel_for(args.batch * shape.kv_heads, [&](int64_t task) {
    const EncodeJob& job = args.jobs[task / shape.kv_heads];
    const int64_t head = task % shape.kv_heads;
    each_segment(job.begin, job.end, shape.segment_tokens,
                 [&](int64_t segment, int64_t first, int64_t last, int64_t) {
                   uint8_t* block = job.sequence.summaries[segment];
                   tally({layout.signs(block, head, first), layout.norms(block, head, first),
                          last - first},
                         shape, job.statistics, head, direction);
                 });
  });
}

}  // namespace

void CpuBackend::encode(const EncodeArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  const SummaryLayout layout = shape.summary();
  for (int64_t j = 0; j < args.batch; ++j) {
    const EncodeJob& job = args.jobs[j];
    const int64_t first_segment = job.begin / shape.segment_tokens;
    const int64_t segments = (job.end - 1) / shape.segment_tokens - first_segment + 1;
    if (job.begin >= job.end) continue;
    pool_.parallel_for(segments * shape.kv_heads, [&](int64_t task) {
      const int64_t segment = first_segment + task / shape.kv_heads;
      const int64_t head = task % shape.kv_heads;
      const int64_t begin = std::max(job.begin, segment * shape.segment_tokens);
      const int64_t end = std::min(job.end, (segment + 1) * shape.segment_tokens);
      const int64_t slot = begin % shape.segment_tokens;
      uint8_t* block = job.sequence.summaries[segment];
      kernels_.encode({row_at(shape, job.sequence, head, begin), shape.dtype,
                       shape.row_elements(), end - begin, shape.head_dim, shape.rotated_dim,
                       args.codec->rotation_signs.data(), args.codec->thresholds.data(),
                       args.codec->centres.data(), layout.signs(block, head, slot),
                       layout.norms(block, head, slot), layout.scales(block, head, slot),
                       layout.records(block, head, slot)});
    });
  }
  tally_jobs(pool_, args, 1);
}

void CpuBackend::forget(const EncodeArgs& args, Stream) { tally_jobs(pool_, args, -1); }

}  // namespace pariskv::cpu
