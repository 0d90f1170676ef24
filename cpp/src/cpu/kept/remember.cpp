// Queries, rounded, to where they are remembered.
#include "cpu/rows.h"
#include "cpu/step.h"

namespace pariskv::cpu {

namespace {

/** The query of one position, all of its heads. */
void remember_one(const Kernels& kernels, const ModelShape& shape, const Logits& logits,
                  const SequenceView& sequence, int64_t position, const TensorView& q,
                  int64_t row) {
  const RecentLayout layout = shape.recent_queries();
  const int64_t slot = layout.slot_of(position);
  float query[kMaxHeadDim];
  for (int64_t head = 0; head < layout.query_heads; ++head) {
    read_query(kernels, shape, q, row, head, query);
    round_query(query, layout.key_dim, logits.scale, logits.softcap,
                layout.scale(sequence[Part::kRecent], slot, head),
                layout.numbers(sequence[Part::kRecent], slot, head));
  }
  *layout.position(sequence[Part::kRecent], slot) = position + 1;
}

}  // namespace

void remember(const CpuDevice& device, const RememberArgs& args) {
  device.pool.parallel_for(args.batch * args.shape.recent, [&](int64_t task) {
    const RememberJob& job = args.jobs[task / args.shape.recent];
    const int64_t row = task % args.shape.recent;
    if (row >= job.q.shape[0]) return;
    remember_one(device.kernels, args.shape, args.logits, job.sequence, job.begin + row, job.q,
                 row);
  });
}

void remember_step(const CpuDevice& device, const DecodeArgs& args) {
  if (args.shape.recent == 0) return;
  device.pool.parallel_for_all(args.batch, [&](int64_t i) {
    const SequenceView& sequence = args.sequences[i];
    remember_one(device.kernels, args.shape, args.logits, sequence, sequence.total - 1, args.q, i);
  });
}

}  // namespace pariskv::cpu
