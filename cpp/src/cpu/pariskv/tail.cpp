// Which rows stand for the keys that a search has not selected.
#include "tail.h"

#include <algorithm>
#include <cmath>

#include "cpu/narrow_rows.h"
#include "cpu/pariskv/common_part.h"
#include "cpu/pariskv/search.h"

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
  const ModelShape& shape = args.shape;
  const TailCopies copies = shape.tail_copies(Tail::capacity(needs_.tail_rows));
  for (int64_t j = 0; j < args.batch; ++j) {
    const TailCopyJob& job = args.jobs[j];
    char* const block = job.sequence[Part::kTailCopies];
    const int64_t first = common_rows(job.tail.count, needs_.tail_rows);
    device_.pool.parallel_for(shape.kv_heads, [&](int64_t head) {
      NarrowRows rows(device_.kernels, shape, job.sequence, head);
      const auto plain = [&](int64_t position) {
        return plain_row_at(shape, job.sequence, head, position);
      };
      const auto copy = [&](int64_t dim, const CommonPart& common, char* RowPlace::* half,
                            const auto& read) {
        const Halves<decltype(read)> halves{dim, read};
        if (job.from == 0) halves.set_common(first, common);
        for (int64_t i = job.from; i < job.tail.count; ++i) {
          halves.narrow(device_.kernels, i, common, tail_copy(shape, copies, block, head, i).*half);
        }
      };
      copy(shape.rows.key_dim, copies.of_keys(block, head), &RowPlace::key,
           [&](int64_t i, float* out) {
             const int64_t position = job.tail.position(i);
             if (shape.narrows()) return rows.read_key(position, out);
             read_key(device_.kernels, shape.rows, plain(position).key, out);
           });
      copy(shape.rows.value_dim, copies.of_values(block, head), &RowPlace::value,
           [&](int64_t i, float* out) {
             const int64_t position = job.tail.position(i);
             if (shape.narrows()) return rows.read_value(position, out);
             device_.kernels.to_float(plain(position).value, shape.rows.value, shape.rows.value_dim,
                                      out);
           });
    });
  }
}

}  // namespace pariskv::cpu
