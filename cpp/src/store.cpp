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
  bool has(int64_t segment) const { return segment >= first && segment < last; }
};

/** Whether all rows of a segment lie in the zone. */
bool in_zone(int64_t segment, int64_t segment_tokens, const LayerStore::Writes& writes) {
  return segment * segment_tokens >= writes.zone_begin &&
         (segment + 1) * segment_tokens <= writes.zone_end;
}

}  // namespace

bool LayerStore::ready(int64_t segment_tokens, const Writes& writes) const {
  const SegmentRange rows(writes.rows_begin, writes.rows_end, segment_tokens);
  if (rows.last > segments()) return false;
  for (int64_t s = rows.first; s < rows.last; ++s) {
    if (rows_[s].use_count() != 1 || rows_[s]->leaving()) return false;
  }
  // Beside the written ones only a truncation makes resident rows of offloaded ones: the last few.
  for (int64_t s = segments() - 1; s >= 0 && !in_zone(s, segment_tokens, writes); --s) {
    if (rows_[s]->offloaded()) return false;
  }
  const SegmentRange summaries(writes.summaries_begin, writes.summaries_end, segment_tokens);
  if (summaries.last > segments()) return false;
  for (int64_t s = summaries.first; s < summaries.last; ++s) {
    if (!summaries_[s] || summaries_[s].use_count() != 1) return false;
  }
  return true;
}

LayerStore LayerStore::planned(int64_t segment_tokens, BlockBytes bytes, const Writes& writes,
                               Backend& backend, Stream stream) const {
  const SegmentRange rows(writes.rows_begin, writes.rows_end, segment_tokens);
  const SegmentRange summaries(writes.summaries_begin, writes.summaries_end, segment_tokens);
  const int64_t count = std::max(rows.last, segments());
  LayerStore next;
  next.rows_.resize(size_t(count));
  next.summaries_.resize(size_t(count));
  next.row_table_.resize(size_t(count));
  next.summary_table_.resize(size_t(count));

  for (int64_t s = 0; s < count; ++s) {
    // The right block is there: ours and `held`, nobody else's, not under a copy.
    const std::shared_ptr<RowBlock> held = s < segments() ? rows_[s] : nullptr;
    const bool foreign = rows.has(s) && held && (held.use_count() > 2 || held->leaving());
    const bool far = held && held->offloaded() && !in_zone(s, segment_tokens, writes);
    next.rows_[s] = held;
    if (!held || foreign || far) {
      Block block = backend.arena().allocate(bytes.rows);
      if (held) backend.copy(block.data(), held->data(), bytes.rows, stream);
      next.rows_[s] = std::make_shared<RowBlock>(backend, std::move(block));
    }
    next.row_table_[s] = next.rows_[s]->data();

    const std::shared_ptr<Block> known = s < segments() ? summaries_[s] : nullptr;
    const bool shared = known && known.use_count() > 2;
    next.summaries_[s] = known;
    if (summaries.has(s) && (!known || shared)) {
      next.summaries_[s] = std::make_shared<Block>(backend.arena().allocate(bytes.summaries));
      void* block = next.summaries_[s]->data();
      if (known) {
        backend.copy(block, known->data(), bytes.summaries, stream);
      } else if (backend.has_books()) {
        backend.zero(block, bytes.summaries, stream);  // kernels read beyond the zone, to no effect
      }
    }
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
