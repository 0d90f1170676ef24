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

/** Room for so many, so that growing to that cannot fail. */
template <typename T>
void make_room(std::vector<T>& vector, int64_t count) {
  if (size_t(count) > vector.capacity()) vector.reserve(std::max(size_t(count), 2 * vector.size()));
}

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
    if (rows_[s] && rows_[s]->offloaded()) return false;
  }
  const SegmentRange summaries(writes.summaries_begin, writes.summaries_end, segment_tokens);
  if (summaries.last > segments()) return false;
  for (int64_t s = summaries.first; s < summaries.last; ++s) {
    if (!summaries_[s] || summaries_[s].use_count() != 1) return false;
  }
  return true;
}

int64_t LayerStore::room_behind(int64_t total, int64_t segment_tokens) const {
  const int64_t first = total / segment_tokens;
  int64_t end = first;
  while (end < segments() && rows_[end].use_count() == 1 && !rows_[end]->leaving() &&
         !rows_[end]->offloaded()) {
    ++end;
  }
  return std::max(end * segment_tokens - total, int64_t{0});
}

LayerStore::Growth LayerStore::planned(int64_t segment_tokens, BlockBytes bytes,
                                       const Writes& writes, Backend& backend, Stream stream) {
  const SegmentRange rows(writes.rows_begin, writes.rows_end, segment_tokens);
  const SegmentRange summaries(writes.summaries_begin, writes.summaries_end, segment_tokens);
  const int64_t count = std::max(rows.last, segments());
  make_room(rows_, count);
  make_room(summaries_, count);
  Growth next;
  next.row_table_ = row_table_;
  next.summary_table_ = summary_table_;
  next.row_table_.resize(size_t(count));
  next.summary_table_.resize(size_t(count));

  // Segments of the zone that are not written stay as they are.
  int64_t first = count;
  while (first > 0 && !in_zone(first - 1, segment_tokens, writes)) --first;
  if (rows.first < rows.last) first = std::min(first, rows.first);
  if (summaries.first < summaries.last) first = std::min(first, summaries.first);
  for (int64_t s = first; s < count; ++s) {
    const std::shared_ptr<RowBlock>* held = s < segments() && rows_[s] ? &rows_[s] : nullptr;
    const bool missing = rows.has(s) && !held;
    const bool foreign = rows.has(s) && held && (held->use_count() > 1 || (*held)->leaving());
    const bool far = held && (*held)->offloaded() && !in_zone(s, segment_tokens, writes);
    if (missing || foreign || far) {
      Block block = backend.arena().allocate(bytes.rows, Holds::kRows);
      if (held) backend.copy(block.data(), (*held)->data(), bytes.rows, stream);
      next.row_table_[s] = block.data();
      next.row_blocks_.emplace_back(
          s, std::make_shared<RowBlock>(backend.offloads(), std::move(block)));
    }
    const std::shared_ptr<Block> none;
    const std::shared_ptr<Block>& known = s < segments() ? summaries_[s] : none;
    if (summaries.has(s) && (!known || known.use_count() > 1)) {
      Block block = backend.arena().allocate(bytes.summaries, Holds::kSummaries);
      if (known) backend.copy(block.data(), known->data(), bytes.summaries, stream);
      next.summary_table_[s] = block.as<uint8_t>();
      next.summary_blocks_.emplace_back(s, std::make_shared<Block>(std::move(block)));
    }
  }
  return next;
}

std::vector<int64_t> LayerStore::hosted(const Growth* growth) const {
  const int64_t count = growth == nullptr ? segments() : growth->segments();
  std::vector<int64_t> found;
  for (int64_t s = 0; s < count; ++s) {
    const std::shared_ptr<RowBlock>& rows =
        growth == nullptr ? row_block(s) : row_block(s, *growth);
    if (rows && rows->offloaded()) found.push_back(s);
  }
  return found;
}

void LayerStore::row_moved(int64_t segment) noexcept {
  row_table_[segment] = rows_[segment]->data();
  const auto is_far = [](const auto& rows) { return rows && rows->offloaded(); };
  has_moved_ = is_far(rows_[segment]) || std::any_of(rows_.begin(), rows_.end(), is_far);
}

void LayerStore::grow(Growth growth) noexcept {
  rows_.resize(size_t(growth.segments()));  // there is room
  summaries_.resize(size_t(growth.segments()));
  for (auto& [segment, block] : growth.row_blocks_) rows_[segment] = std::move(block);
  for (auto& [segment, block] : growth.summary_blocks_) summaries_[segment] = std::move(block);
  row_table_.swap(growth.row_table_);
  summary_table_.swap(growth.summary_table_);
}

const std::shared_ptr<RowBlock>& LayerStore::row_block(int64_t segment,
                                                       const Growth& growth) const {
  for (const auto& [changed, block] : growth.row_blocks_) {
    if (changed == segment) return block;
  }
  return rows_[segment];
}

void LayerStore::give_back(int64_t first, int64_t last) noexcept {
  give_back_rows(first, last);
  for (int64_t s = first; s < last; ++s) {
    summaries_[s].reset();
    summary_table_[s] = nullptr;
  }
}

void LayerStore::give_back_rows(int64_t first, int64_t last) noexcept {
  for (int64_t s = first; s < last; ++s) {
    rows_[s].reset();
    row_table_[s] = nullptr;
  }
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
