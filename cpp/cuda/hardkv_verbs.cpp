// HARD-KV's part of the backend: choices of kept rows, steps over them.
#include <algorithm>

#include "choices.h"
#include "cuda_backend.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/**
 * Calls `visit(call)` for one launch of choices after the other: `space` is still to be set. Large
 * ones are made some kv heads at a time.
 */
template <typename Visit>
void each_choice(const HardKVKeep& args, Visit visit) {
  const auto scratch = [&](const KeptChange& change, SideBySide& side) {
    side.call.scratch = choice_scratch(args.shape, most_rows(change),
                                       change.fresh() ? 0 : change.before.kept_capacity,
                                       change.after.kept_capacity);
    side.head_bytes = side.call.scratch.bytes;
  };
  const auto launch = [&](SideBySide& side) {
    ChoiceCall& call = side.call;
    const HardKVRules& rules = args.rules;
    call.rules = {rules.most, rules.least, rules.p, rules.pool, rules.patience};
    const int64_t kv_heads = call.heads;
    const int64_t at_once = call.count > 1
                                ? kv_heads
                                : std::clamp(kChoiceBytes / side.head_bytes, int64_t{1}, kv_heads);
    for (call.first_head = 0; call.first_head < kv_heads; call.first_head += at_once) {
      call.heads = std::min(at_once, kv_heads - call.first_head);
      visit(call);
    }
  };
  side_by_side(args.shape, args.changes, args.batch, kChoiceBytes, scratch, launch);
}

}  // namespace

int64_t CudaBackend::choice_bytes(const HardKVKeep& args) {
  int64_t bytes = 0;
  each_choice(args, [&](const ChoiceCall& call) {
    bytes = std::max(bytes, call.count * call.heads * call.scratch.bytes);
  });
  return bytes;
}

void CudaBackend::keep_up(const HardKVKeep& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (!change.cut()) continue;
    launch_trim(trim_of(args.shape, change), handle_of(stream));
  }
  each_choice(args, [&](ChoiceCall& call) {
    call.space = choices_.as<char>();
    launch_choice(call, handle_of(stream));
  });
}

void CudaBackend::reserve_lane(int64_t row, const DecodeArgs& args, const HardKVRules&,
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

void CudaBackend::launch(const DecodeArgs& args, const HardKVRules&, Stream stream) {
  launch_kept_decode({step_of(args, lanes_.as<Lane>())}, handle_of(stream));
}

Trace CudaBackend::trace(const DecodeArgs& args, const HardKVRules&, Stream) {
  const SequenceView& sequence = args.sequences[0];
  const KeptLayout layout = args.shape.kept(sequence.kept_capacity);
  std::vector<char> block(static_cast<size_t>(layout.ages_offset()));
  fetch(block.data(), sequence.kept, layout.ages_offset());
  HardKVTrace trace;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int32_t* counts = layout.counts(block.data(), head);
    const int32_t* positions = layout.positions(block.data(), head);
    trace.kept.emplace_back(positions, positions + counts[0]);
    trace.held.emplace_back(positions + counts[0], positions + counts[0] + counts[1]);
  }
  return trace;
}

}  // namespace pariskv::cuda
