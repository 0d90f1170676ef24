#include "store.h"

#include <algorithm>

namespace pariskv {

namespace {

/** Segments that positions [begin, end) touch. */
struct SegmentRange {
  SegmentRange(int64_t begin, int64_t end, int64_t segment_tokens)
      : first(begin / segment_tokens),
        last(begin < end ? (end + segment_tokens - 1) / segment_tokens : first) {}
  int64_t first, last;
};

bool exclusive(const std::shared_ptr<Block>& block) { return block && block.use_count() == 1; }

}  // namespace

bool LayerStore::ready(int64_t segment_tokens, const Writes& writes) const {
  const auto all_exclusive = [&](const Blocks& blocks, int64_t begin, int64_t end) {
    const SegmentRange range(begin, end, segment_tokens);
    if (range.last > int64_t(blocks.size())) return false;
    return std::all_of(blocks.begin() + range.first, blocks.begin() + range.last, exclusive);
  };
  return all_exclusive(rows_, writes.rows_begin, writes.rows_end) &&
         all_exclusive(summaries_, writes.summaries_begin, writes.summaries_end);
}

LayerStore LayerStore::planned(int64_t segment_tokens, BlockBytes bytes, const Writes& writes,
                               Arena& arena, const Copy& copy) const {
  LayerStore next;
  const SegmentRange rows(writes.rows_begin, writes.rows_end, segment_tokens);
  const int64_t segments = std::max(rows.last, int64_t(rows_.size()));
  next.rows_.resize(size_t(segments));
  next.summaries_.resize(size_t(segments));
  next.row_table_.resize(size_t(segments));
  next.summary_table_.resize(size_t(segments));

  const auto fill = [&](const Blocks& from, Blocks& to, const SegmentRange& range,
                        int64_t block_bytes) {
    for (int64_t s = 0; s < segments; ++s) {
      const std::shared_ptr<Block> held = s < int64_t(from.size()) ? from[s] : nullptr;
      const bool written = s >= range.first && s < range.last;
      if (!written || (held && held.use_count() == 2)) {  // ours and `held`: nobody else's
        to[s] = held;
        continue;
      }
      to[s] = std::make_shared<Block>(arena.allocate(block_bytes));
      if (held) copy(to[s]->data(), held->data(), block_bytes);
    }
  };
  fill(rows_, next.rows_, rows, bytes.rows);
  fill(summaries_, next.summaries_,
       SegmentRange(writes.summaries_begin, writes.summaries_end, segment_tokens), bytes.summaries);

  for (int64_t s = 0; s < segments; ++s) {
    next.row_table_[s] = next.rows_[s]->data();
    next.summary_table_[s] = next.summaries_[s] ? next.summaries_[s]->as<uint8_t>() : nullptr;
  }
  return next;
}

void LayerStore::drop(int64_t segment_tokens, int64_t total, int64_t zone_begin,
                      int64_t zone_end) noexcept {
  const size_t keep = size_t(SegmentRange(0, total, segment_tokens).last);
  if (keep < rows_.size()) {
    rows_.erase(rows_.begin() + keep, rows_.end());
    summaries_.erase(summaries_.begin() + keep, summaries_.end());
    row_table_.erase(row_table_.begin() + keep, row_table_.end());
    summary_table_.erase(summary_table_.begin() + keep, summary_table_.end());
  }
  const SegmentRange zone(zone_begin, zone_end, segment_tokens);
  for (int64_t s = zone.last; s < int64_t(summaries_.size()); ++s) {
    summaries_[s].reset();
    summary_table_[s] = nullptr;
  }
}

}  // namespace pariskv
