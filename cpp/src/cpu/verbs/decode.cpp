// A decode step: attention to resident rows, the policy's search, attention to the rows it selects;
// over scratch that is cut anew for every step. And the upkeep that a policy asks for.
#include "check.h"
#include "cpu/cpu_backend.h"
#include "tail.h"

namespace pariskv::cpu {

namespace {

bool any_sparse(const DecodeArgs& args) {
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.sequences[i].sparse != 0) return true;
  }
  return false;
}

}  // namespace

Running CpuBackend::cut(const DecodeArgs& args, Cutter& cutter) {
  const ModelShape& shape = args.shape;
  const int64_t queries = args.batch * shape.query_heads();
  const int64_t lists = any_sparse(args) ? args.batch * shape.kv_heads : 0;
  Running running{};
  running.maximum = cutter.take<float>(queries);
  running.sum = cutter.take<float>(queries);
  running.weighted = cutter.take<float>(queries * shape.rows.value_dim);
  running.selection.width = rows_per_head(args.rules);
  running.selection.position = cutter.take<int32_t>(lists * running.selection.width);
  running.selection.count = cutter.take<int64_t>(lists);
  running.selection.tail_width = Tail::capacity(tail_rows(args.rules));
  running.selection.tail_number = cutter.take<int32_t>(lists * running.selection.tail_width);
  running.selection.tail_count = cutter.take<int64_t>(lists);
  running.selection.tail_weight = cutter.take<float>(lists > 0 ? args.batch : 0);
  std::visit([&](const auto& rules) { step_of(rules).cut(args, rules, running.selection, cutter); },
             args.rules);
  return running;
}

void CpuBackend::reserve(const DecodeArgs& args) {
  Cutter measure(nullptr);
  cut(args, measure);
  reserve_scratch(measure.bytes());
}

void CpuBackend::reserve(const Upkeep& upkeep) {
  if (const auto* keep = std::get_if<HardKVKeep>(&upkeep)) {
    reserve_scratch(hardkv_.scratch_bytes(*keep));
  }
  if (const auto* keep = std::get_if<PRKVKeep>(&upkeep)) {
    reserve_scratch(prkv_.scratch_bytes(*keep));
  }
}

void CpuBackend::reserve_scratch(int64_t bytes) {
  if (bytes <= scratch_.bytes()) return;
  scratch_ = Block();  // first, so that old and new are never held together
  try {
    scratch_ = arena_.allocate(bytes + bytes / 8);  // a growing zone asks a little more each time
  } catch (const OutOfMemory&) {
    scratch_ = arena_.allocate(bytes);
  }
}

void CpuBackend::decode(const DecodeArgs& args, Stream) {
  Cutter cutter(scratch_.as<char>());
  const Running running = cut(args, cutter);
  PKV_ASSERT(cutter.bytes() <= scratch_.bytes());
  attend_resident(args, running);
  if (any_sparse(args)) {
    std::visit(
        [&](const auto& rules) {
          step_of(rules).search(args, rules, running);
          step_of(rules).count(args.shape, counts_);
        },
        args.rules);
  }
  // Nothing stops the call from here on. Queries are remembered before outputs are written, one of
  // which may lie where its query lies.
  if (!args.traced && args.k.data != nullptr) remember_step(args);
  attend_selected(args, running);
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.sequences[i].sparse == 0) continue;
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      counts_.rows += running.selection.count[i * args.shape.kv_heads + head];
    }
  }
}

Trace CpuBackend::trace(const DecodeArgs& args, Stream stream) {
  const DecodeCounts before = counts_;
  decode(args, stream);
  counts_ = before;
  if (!any_sparse(args)) return {};
  return std::visit([&](const auto& rules) { return step_of(rules).trace(args, rules); },
                    args.rules);
}

void CpuBackend::keep_up(const Upkeep& upkeep, Stream) {
  std::visit([&](const auto& args) { step_of(args).keep_up(args); }, upkeep);
}

}  // namespace pariskv::cpu
