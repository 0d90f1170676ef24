// Which rows stand for the keys that a search has not selected.
#include "tail.h"

#include <algorithm>
#include <cmath>

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

void ParisKVSearch::copy_tail_rows(const TailCopyArgs& args, Stream) {
  const int64_t capacity = Tail::capacity(needs_.tail_rows);
  const RowFormat format = args.shape.tail_rows();
  for (int64_t i = 0; i < args.batch; ++i) {
    const TailCopyJob& job = args.jobs[i];
    device_.pool.parallel_for(args.shape.kv_heads, [&](int64_t head) {
      for (int64_t number = job.from; number < job.tail.count; ++number) {
        const int64_t position = job.tail.position(number);
        convert_row(device_.kernels, row_at(args.shape, job.sequence, head, position),
                    args.shape.zone_rows(),
                    tail_copy(args.shape, job.sequence, head, number, capacity), format);
      }
    });
  }
}

}  // namespace pariskv::cpu
