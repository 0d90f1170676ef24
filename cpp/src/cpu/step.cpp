#include "cpu/step.h"

#include <algorithm>

#include "check.h"
#include "tail.h"

namespace pariskv::cpu {

namespace {

bool any_searched(const DecodeArgs& args) {
  for (int64_t i = 0; i < args.batch; ++i) {
    if (!args.sequences[i].dense()) return true;
  }
  return false;
}

}  // namespace

void Scratch::reserve(int64_t bytes) {
  if (bytes <= block_.bytes()) return;
  block_ = Block();  // first, so that old and new are never held together
  try {
    block_ = arena_.allocate(bytes + bytes / 8);  // a growing zone asks a little more each time
  } catch (const OutOfMemory&) {
    block_ = arena_.allocate(bytes);
  }
}

Running Step::cut(const DecodeArgs& args, Finder& finder, Cutter& cutter) const {
  const ModelShape& shape = args.shape;
  const int64_t queries = args.batch * shape.query_heads();
  const int64_t lists = any_searched(args) ? args.batch * shape.kv_heads : 0;
  Running running{};
  running.maximum = cutter.take<float>(queries);
  running.sum = cutter.take<float>(queries);
  running.weighted = cutter.take<float>(queries * shape.rows.value_dim);
  running.selection.width = needs_.rows_per_head;
  running.selection.position = cutter.take<int32_t>(lists * running.selection.width);
  running.selection.count = cutter.take<int64_t>(lists);
  running.selection.tail_width = Tail::capacity(needs_.tail_rows);
  running.selection.tail_number = cutter.take<int32_t>(lists * running.selection.tail_width);
  running.selection.tail_count = cutter.take<int64_t>(lists);
  const int64_t searched = lists > 0 ? args.batch : 0;
  running.selection.tail_position = cutter.take<int32_t>(searched * running.selection.tail_width);
  running.selection.tail_weight = cutter.take<float>(searched);
  if (lists > 0 && finder.weighs_tail(args)) {
    running.selection.tail_squares = cutter.take<float>(queries);
  }
  finder.cut(args, running.selection, cutter);
  return running;
}

void Step::reserve(const DecodeArgs& args, Finder& finder) {
  Cutter measure(nullptr);
  cut(args, finder, measure);
  scratch_.reserve(measure.bytes());
}

void Step::run(const DecodeArgs& args, Finder& finder) {
  Cutter cutter(scratch_.data());
  const Running running = cut(args, finder, cutter);
  PKV_ASSERT(cutter.bytes() <= scratch_.bytes());
  attend_resident(args, running);
  for (int64_t i = 0; i < args.batch && args.error.data != nullptr; ++i) {  // a search adds its own
    std::fill_n(floats_of(args.error, i), args.shape.kv_heads, 0.0f);
  }
  if (any_searched(args)) finder.find(args, running);
  // Nothing stops the call from here on. Queries are remembered before outputs are written, one of
  // which may lie where its query lies.
  if (!args.traced && args.k.data != nullptr) remember_step(device_, args);
  attend_selected(args, running);
  if (any_searched(args)) finder.judge(args, running);
  if (!args.traced) count(args, running, finder);
}

void Step::count(const DecodeArgs& args, const Running& running, const Finder& finder) {
  if (!any_searched(args)) return;
  finder.count(counts_);
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.sequences[i].dense()) continue;
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      counts_.rows += running.selection.count[i * args.shape.kv_heads + head];
    }
  }
}

}  // namespace pariskv::cpu
