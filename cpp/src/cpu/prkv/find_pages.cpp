// PRKV's search: the pages that promise most by their digests, and their rows.
#include <algorithm>
#include <cmath>
#include <functional>

#include "cpu/kept/choice.h"
#include "cpu/numerics.h"
#include "cpu/prkv/search.h"
#include "cpu/rows.h"
#include "policy/prkv/pages.h"

namespace pariskv::cpu {

namespace {

/** A number that is larger for a larger score, with the lower page before the higher one. */
uint64_t rank_of(float score, int64_t page) {
  const uint32_t bits = bits_of(score + 0.0f);  // there is one zero
  const uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{rising} << 32 | (0xffffffffu - uint32_t(page));
}

int64_t page_of(uint64_t rank) { return 0xffffffffu - uint32_t(rank); }

}  // namespace

void PRKVSearch::cut(const DecodeArgs& args, const Selection& selection, Cutter& cutter) {
  const ModelShape& shape = args.shape;
  const int64_t heads = shape.kv_heads;
  items_.clear();
  for (int64_t i = 0; i < args.batch; ++i) {
    const SequenceView& sequence = args.sequences[i];
    if (sequence.dense()) continue;
    Item item{};
    item.sequence = sequence;
    item.row = i;
    item.first_page = sequence.zone_begin / rules_.page;
    item.pages = (sequence.zone_end - 1) / rules_.page + 1 - item.first_page;
    item.selected = selection.position + i * heads * selection.width;
    item.selections = selection.count + i * heads;
    item.width = selection.width;
    item.query = cutter.take<float>(shape.query_heads() * shape.rows.key_dim);
    item.asking = cutter.take<int64_t>(heads);
    item.scores = cutter.take<float>(heads * item.pages);
    item.order = cutter.take<uint64_t>(heads * item.pages);
    item.live = cutter.take<uint64_t>(heads * item.pages);
    item.found = cutter.take<int64_t>(heads);
    items_.push_back(item);
  }
}

void PRKVSearch::load_queries(const DecodeArgs& args, const Item& item, int64_t head) {
  const int64_t dim = args.shape.rows.key_dim, group = args.shape.group;
  float* query = item.query + head * group * dim;
  int64_t asking = 0;
  for (int64_t g = 0; g < group; ++g) {
    float* own = query + asking * dim;
    read_query(device_.kernels, args.shape, args.q, item.row, head * group + g, own);
    asking += std::all_of(own, own + dim, [](float x) { return std::isfinite(x); });
  }
  item.asking[head] = asking;
}

void PRKVSearch::score_segment(const Item& item, int64_t head, int64_t segment) {
  const PageLayout layout = pages_of(shape_, rules_.page);
  uint8_t* block = item.sequence.summaries[segment];
  const int64_t begin = std::max(segment * layout.pages, item.first_page);
  const int64_t end = std::min((segment + 1) * layout.pages, item.first_page + item.pages);
  const int64_t slot = begin - segment * layout.pages;
  const int64_t at = head * item.pages + begin - item.first_page;
  std::copy_n(layout.live(block, head, slot), end - begin, item.live + at);
  const int64_t dim = shape_.rows.key_dim;
  device_.kernels.score_pages({layout.digest(block, head, slot), layout.unit(block, head, slot),
                               end - begin, dim, item.asking[head],
                               item.query + head * shape_.group * dim, item.scores + at});
}

void PRKVSearch::find_pages(const Item& item, int64_t head) {
  const ModelShape& shape = shape_;
  float* scores = item.scores + head * item.pages;
  uint64_t* live = item.live + head * item.pages;
  if (item.sequence[Part::kKept] != nullptr) {
    const AmendedLayout amended = amended_of(shape, item.sequence.kept_capacity);
    const PageLayout pages = amended.pages();
    char* block = amended.digests(item.sequence[Part::kKept]);
    const int64_t* numbers = amended.numbers(item.sequence[Part::kKept], head);
    for (int64_t i = 0; i < *amended.count(item.sequence[Part::kKept], head); ++i) {
      const int64_t page = numbers[i] - item.first_page, dim = shape.rows.key_dim;
      live[page] = *pages.live(block, head, i);
      device_.kernels.score_pages({pages.digest(block, head, i), pages.unit(block, head, i), 1, dim,
                                   item.asking[head], item.query + head * shape.group * dim,
                                   scores + page});
    }
  }
  uint64_t* order = item.order + head * item.pages;
  int64_t candidates = 0;
  for (int64_t p = 0; p < item.pages; ++p) {
    if (live[p] == 0) scores[p] = -INFINITY;
    if (live[p] != 0) order[candidates++] = rank_of(scores[p], p);
  }
  if (item.asking[head] == 0) candidates = 0;  // there is nothing to find them by
  const int64_t found = std::min(item.split.pages, candidates);
  if (found < candidates) {
    std::nth_element(order, order + found, order + candidates, std::greater<uint64_t>());
  }
  std::sort(order, order + found, std::greater<uint64_t>());
  int32_t* selected = item.selected + head * item.width;
  int64_t count = 0;
  for (int64_t i = 0; i < found; ++i) {
    const int64_t page = page_of(order[i]);
    const int64_t begin = (item.first_page + page) * rules_.page;
    for (int64_t r = 0; r < rules_.page; ++r) {
      if ((live[page] >> r & 1) != 0) selected[count++] = int32_t(begin + r);
    }
  }
  item.found[head] = found;
  item.selections[head] = count;
}

void PRKVSearch::find(const DecodeArgs& args, const Running&) {
  const ModelShape& shape = args.shape;
  for (Item& item : items_) {
    const bool keeps = item.sequence[Part::kKept] != nullptr;
    item.split =
        keeps ? *amended_of(shape, item.sequence.kept_capacity).split(item.sequence[Part::kKept])
              : rules_.split(0);
    std::fill_n(item.selections, shape.kv_heads, 0);
    std::fill_n(item.found, shape.kv_heads, 0);
    if (item.split.pages == 0) continue;
    const int64_t per_segment = shape.segment_tokens / rules_.page;
    const int64_t first = item.first_page / per_segment;
    const int64_t segments = (item.first_page + item.pages - 1) / per_segment + 1 - first;
    device_.pool.parallel_for(shape.kv_heads,
                              [&](int64_t head) { load_queries(args, item, head); });
    device_.pool.parallel_for(shape.kv_heads * segments, [&](int64_t task) {
      score_segment(item, task / segments, first + task % segments);
    });
    device_.pool.parallel_for(shape.kv_heads, [&](int64_t head) { find_pages(item, head); });
  }
}

PRKVTrace PRKVSearch::trace(const DecodeArgs& args, Stream stream) {
  decode(args, stream);
  const Item& item = items_.front();
  PRKVTrace trace;
  trace.static_rows = item.split.rows;
  trace.kept = kept_positions(args.shape, item.sequence, false);
  for (int64_t head = 0; item.split.pages > 0 && head < args.shape.kv_heads; ++head) {
    const float* scores = item.scores + head * item.pages;
    const uint64_t* order = item.order + head * item.pages;
    const int32_t* selected = item.selected + head * item.width;
    trace.scores.emplace_back(scores, scores + item.pages);
    for (float& score : trace.scores.back())
      score /= float(std::max<int64_t>(item.asking[head], 1));
    std::vector<int64_t>& pages = trace.pages.emplace_back();
    for (int64_t i = 0; i < item.found[head]; ++i) {
      pages.push_back(item.first_page + page_of(order[i]));
    }
    trace.positions.emplace_back(selected, selected + item.selections[head]);
  }
  return trace;
}

}  // namespace pariskv::cpu
