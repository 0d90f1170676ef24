#include "hardkv/search.h"

#include <algorithm>

#include "choices.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/**
 * Calls `visit(call)` for one launch of choices after the other: `space` is still to be set. Large
 * ones are made some kv heads at a time.
 */
template <typename Visit>
void each_choice(const ModelShape& shape, const HardKVRules& rules,
                 const std::vector<KeptChange>& changes, Visit visit) {
  const auto scratch = [&](const KeptChange& change, SideBySide& side) {
    side.call.scratch =
        choice_scratch(shape, most_rows(change), change.fresh() ? 0 : change.before.kept_capacity,
                       change.after.kept_capacity);
    side.head_bytes = side.call.scratch.bytes;
  };
  const auto launch = [&](SideBySide& side) {
    ChoiceCall& call = side.call;
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
  side_by_side(shape, changes.data(), int64_t(changes.size()), kChoiceBytes, scratch, launch);
}

/** Scratch of slots: as much for all sequences. */
struct EqualRooms {
  Arena& arena;
  const ModelShape& shape;

  static Demand demand(const SequenceView&) { return {}; }
  static Demand capacity(const KeptSlot&) { return {}; }
  static int64_t with_room(int64_t none) { return none; }

  Block make(KeptSlot& slot, const Demand&) const {
    slot.head_bytes = kept_decode_bytes(shape);
    Block scratch = arena.allocate(shape.kv_heads * slot.head_bytes);
    slot.scratch = scratch.as<char>();
    return scratch;
  }
};

}  // namespace

void HardKVSearch::reserve_choice(const std::vector<KeptChange>& changes) {
  int64_t bytes = 0;
  each_choice(shape_, rules_, changes, [&](const ChoiceCall& call) {
    bytes = std::max(bytes, call.count * call.heads * call.scratch.bytes);
  });
  choices_.reserve(bytes);
}

void HardKVSearch::choose(const std::vector<KeptChange>& changes, Stream stream) {
  const DeviceGuard guard(backend_.device());
  for (const KeptChange& change : changes) {
    if (change.trims) launch_trim(trim_of(shape_, change), handle_of(stream));
  }
  each_choice(shape_, rules_, changes, [&](ChoiceCall& call) {
    call.space = choices_.data();
    launch_choice(call, handle_of(stream));
  });
}

void HardKVSearch::reserve(const DecodeArgs& args) {
  if (args.traced) return;  // that looks at blocks of kept rows alone
  const DeviceGuard guard(backend_.device());
  slots_.reserve(args, EqualRooms{backend_.arena(), shape_});
}

void HardKVSearch::decode(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  slots_.check_batch(args.batch);
  if (args.batch == 0) return;
  launch_kept_decode({step_of(args), slots_.data()}, handle_of(stream));
}

HardKVTrace HardKVSearch::trace(const DecodeArgs& args) {
  const DeviceGuard guard(backend_.device());
  const SequenceView& sequence = args.sequences[0];
  const KeptLayout layout = shape_.kept(sequence.kept_capacity);
  std::vector<char> block(static_cast<size_t>(layout.ages_offset()));
  backend_.fetch(block.data(), sequence[Part::kKept], layout.ages_offset());
  HardKVTrace trace;
  for (int64_t head = 0; head < shape_.kv_heads; ++head) {
    const int32_t* counts = layout.counts(block.data(), head);
    const int32_t* positions = layout.positions(block.data(), head);
    trace.kept.emplace_back(positions, positions + counts[0]);
    trace.held.emplace_back(positions + counts[0], positions + counts[0] + counts[1]);
  }
  return trace;
}

}  // namespace pariskv::cuda
