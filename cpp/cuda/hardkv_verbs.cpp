// HARD-KV's part of the backend: recent queries, choices of kept rows, steps over them.
#include <algorithm>

#include "cuda_backend.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/** Scratch of choices that are made side by side, unless a single kv head needs more. */
constexpr int64_t kChoiceBytes = int64_t{64} << 20;

/** Rows that a choice is made from, at most, per kv head. */
int64_t most_rows(const KeptChange& change) {
  const int64_t zone = change.after.zone_tokens();
  if (change.fresh()) return zone;
  const int64_t added = change.after.zone_end - change.before.zone_end;
  return std::min(zone, change.before.kept_capacity + added);
}

ChoiceScratch scratch_of(const ModelShape& shape, const KeptChange& change) {
  return choice_scratch(shape, most_rows(change), change.fresh() ? 0 : change.before.kept_capacity,
                        change.after.kept_capacity);
}

ChoiceJob job_of(const KeptChange& change) {
  const bool fresh = change.fresh();
  return {change.after.device,
          fresh ? nullptr : change.before.kept,
          change.after.kept,
          change.after.recent,
          change.before.kept_capacity,
          change.after.kept_capacity,
          fresh ? change.after.zone_begin : change.before.zone_end,
          change.after.zone_end,
          change.queries};
}

/**
 * Calls `visit(call)` for one launch of choices after the other: `space` is still to be set. Large
 * ones are made some kv heads at a time.
 */
template <typename Visit>
void each_choice(const HardKvKeep& args, Visit visit) {
  const int64_t kv_heads = args.shape.kv_heads;
  for (int64_t i = 0; i < args.batch;) {
    ChoiceCall call{};
    call.shape = args.shape;
    const HardKvRules& rules = args.rules;
    call.rules = {rules.most, rules.least, rules.p, rules.pool, rules.patience};
    call.heads = kv_heads;
    // Choices of one launch have their scratch cut alike.
    for (; i < args.batch && call.count < kMostChoices; ++i) {
      if (args.changes[i].cut()) continue;
      const ChoiceScratch scratch = scratch_of(args.shape, args.changes[i]);
      if (call.count == 0) {
        call.scratch = scratch;
      } else if (scratch.bytes != call.scratch.bytes || scratch.width != call.scratch.width ||
                 (call.count + 1) * kv_heads * scratch.bytes > kChoiceBytes) {
        break;
      }
      call.jobs[call.count++] = job_of(args.changes[i]);
    }
    if (call.count == 0) return;
    const int64_t at_once =
        call.count > 1 ? kv_heads
                       : std::clamp(kChoiceBytes / call.scratch.bytes, int64_t{1}, kv_heads);
    for (call.first_head = 0; call.first_head < kv_heads; call.first_head += at_once) {
      call.heads = std::min(at_once, kv_heads - call.first_head);
      visit(call);
    }
  }
}

}  // namespace

void CudaBackend::remember(const RememberArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const RememberJob& job = args.jobs[i];
    launch_remember(
        {args.shape, args.logits, job.sequence.recent, job.begin, job.q.shape[0], rows_of(job.q)},
        handle_of(stream));
  }
}

void CudaBackend::reserve(const Upkeep& upkeep) {
  const auto* keep = std::get_if<HardKvKeep>(&upkeep);
  if (keep == nullptr) return;
  const DeviceGuard guard(device_);
  int64_t bytes = 0;
  each_choice(*keep, [&](const ChoiceCall& call) {
    bytes = std::max(bytes, call.count * call.heads * call.scratch.bytes);
  });
  if (bytes <= choices_.bytes()) return;
  choices_ = Block();  // first, so that old and new are never held together
  choices_ = arena_.allocate(bytes);
}

void CudaBackend::keep_up(const HardKvKeep& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (!change.cut()) continue;
    launch_trim({args.shape, change.before.kept, change.after.kept, change.before.kept_capacity,
                 change.after.kept_capacity, change.after.zone_end},
                handle_of(stream));
  }
  each_choice(args, [&](ChoiceCall& call) {
    call.space = choices_.as<char>();
    launch_choice(call, handle_of(stream));
  });
}

void CudaBackend::reserve_lane(int64_t row, const DecodeArgs& args, const HardKvRules&,
                               const SequenceView& sequence) {
  if (args.traced) return;  // that looks at blocks of kept rows alone
  HostLane& host = host_lane(row);
  Lane lane = host.sent;
  lane.layers = sequence.device - args.layer;
  if (host.scratch.data() == nullptr) {
    lane.head_bytes = kept_decode_bytes(args.shape);
    host.scratch = arena_.allocate(args.shape.kv_heads * lane.head_bytes);
    lane.scratch.resident = host.scratch.as<float>();
  }
  send_lane(row, lane);
}

void CudaBackend::launch(const DecodeArgs& args, const HardKvRules&, Stream stream) {
  launch_kept_decode({step_of(args, lanes_.as<Lane>())}, handle_of(stream));
}

Trace CudaBackend::trace(const DecodeArgs& args, const HardKvRules&, Stream) {
  const SequenceView& sequence = args.sequences[0];
  const KeptLayout layout = args.shape.kept(sequence.kept_capacity);
  std::vector<char> block(static_cast<size_t>(layout.ages_offset()));
  fetch(block.data(), sequence.kept, layout.ages_offset());
  HardKvTrace trace;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int32_t* counts = layout.counts(block.data(), head);
    const int32_t* positions = layout.positions(block.data(), head);
    trace.kept.emplace_back(positions, positions + counts[0]);
    trace.held.emplace_back(positions + counts[0], positions + counts[0] + counts[1]);
  }
  return trace;
}

}  // namespace pariskv::cuda
