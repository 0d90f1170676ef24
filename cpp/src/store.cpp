#include "store.h"

#include <algorithm>

#include "growth.h"

namespace pariskv {

namespace {

/** Blocks of so many tokens that positions [begin, end) touch. */
struct BlockRange {
  BlockRange(int64_t begin, int64_t end, int64_t tokens)
      : first(begin / tokens), last(begin < end ? (end + tokens - 1) / tokens : first) {}
  int64_t first, last;
  bool has(int64_t number) const { return number >= first && number < last; }
};

/** Whether all of a block's rows lie in the zone. */
bool in_zone(int64_t number, int64_t tokens, const LayerStore::Writes& writes) {
  return number * tokens >= writes.zone_begin && (number + 1) * tokens <= writes.zone_end;
}

}  // namespace

bool LayerStore::ready(const Writes& writes) const {
  const BlockRange rows(writes.rows_begin, writes.rows_end, tokens_.rows);
  if (rows.last > row_blocks()) return false;
  for (int64_t i = rows.first; i < rows.last; ++i) {
    if (rows_[i].use_count() != 1 || rows_[i]->leaving()) return false;
  }
  // Beside the written ones only a truncation makes resident rows of offloaded ones: the last few.
  for (int64_t i = row_blocks() - 1; i >= 0 && !in_zone(i, tokens_.rows, writes); --i) {
    if (rows_[i] && rows_[i]->offloaded()) return false;
  }
  const BlockRange summaries(writes.summaries_begin, writes.summaries_end, tokens_.segment);
  if (summaries.last > int64_t(summaries_.size())) return false;
  for (int64_t s = summaries.first; s < summaries.last; ++s) {
    if (!summaries_[s] || summaries_[s].use_count() != 1) return false;
  }
  return true;
}

int64_t LayerStore::room_behind(int64_t total) const {
  int64_t end = total / tokens_.rows;
  while (end < row_blocks() && rows_[end].use_count() == 1 && !rows_[end]->leaving() &&
         !rows_[end]->offloaded()) {
    ++end;
  }
  return std::max(end * tokens_.rows - total, int64_t{0});
}

LayerStore::Growth LayerStore::planned(BlockBytes bytes, const Writes& writes, Backend& backend,
                                       Stream stream) {
  const BlockRange rows(writes.rows_begin, writes.rows_end, tokens_.rows);
  const BlockRange summaries(writes.summaries_begin, writes.summaries_end, tokens_.segment);
  const int64_t count = std::max(rows.last, row_blocks());
  const int64_t segments = BlockRange(0, count * tokens_.rows, tokens_.segment).last;
  make_room(rows_, size_t(count));
  make_room(summaries_, size_t(segments));
  Growth next;
  next.row_table_ = row_table_;
  next.summary_table_ = summary_table_;
  next.row_table_.resize(size_t(count));
  next.summary_table_.resize(size_t(segments));

  // Blocks of the zone that are not written stay as they are.
  int64_t first = count;
  while (first > 0 && !in_zone(first - 1, tokens_.rows, writes)) --first;
  if (rows.first < rows.last) first = std::min(first, rows.first);
  for (int64_t i = first; i < count; ++i) {
    const std::shared_ptr<RowBlock>* held = i < row_blocks() && rows_[i] ? &rows_[i] : nullptr;
    const bool missing = rows.has(i) && !held;
    const bool foreign = rows.has(i) && held && (held->use_count() > 1 || (*held)->leaving());
    const bool far = held && (*held)->offloaded() && !in_zone(i, tokens_.rows, writes);
    if (!missing && !foreign && !far) continue;
    Block block = backend.arena().allocate(bytes.rows, Holds::kRows);
    if (held) backend.copy(block.data(), (*held)->data(), bytes.rows, stream);
    next.row_table_[i] = block.data();
    next.row_blocks_.emplace_back(i,
                                  std::make_shared<RowBlock>(backend.offloads(), std::move(block)));
  }
  for (int64_t s = summaries.first; s < summaries.last; ++s) {
    const std::shared_ptr<Block> none;
    const std::shared_ptr<Block>& known = s < int64_t(summaries_.size()) ? summaries_[s] : none;
    if (known && known.use_count() == 1) continue;
    Block block = backend.arena().allocate(bytes.summaries, Holds::kSummaries);
    if (known) backend.copy(block.data(), known->data(), bytes.summaries, stream);
    next.summary_table_[s] = block.as<uint8_t>();
    next.summary_blocks_.emplace_back(s, std::make_shared<Block>(std::move(block)));
  }
  return next;
}

std::vector<int64_t> LayerStore::hosted(const Growth* growth) const {
  const int64_t count = growth == nullptr ? row_blocks() : growth->row_blocks();
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; ++i) {
    const std::shared_ptr<RowBlock>& rows =
        growth == nullptr ? row_block(i) : row_block(i, *growth);
    if (rows && rows->offloaded()) found.push_back(i);
  }
  return found;
}

void LayerStore::row_moved(int64_t number) noexcept {
  row_table_[number] = rows_[number]->data();
  const auto is_far = [](const auto& rows) { return rows && rows->offloaded(); };
  has_moved_ = is_far(rows_[number]) || std::any_of(rows_.begin(), rows_.end(), is_far);
}

void LayerStore::grow(Growth growth) noexcept {
  rows_.resize(size_t(growth.row_blocks()));  // there is room
  summaries_.resize(growth.summary_table_.size());
  for (auto& [number, block] : growth.row_blocks_) rows_[number] = std::move(block);
  for (auto& [segment, block] : growth.summary_blocks_) summaries_[segment] = std::move(block);
  row_table_.swap(growth.row_table_);
  summary_table_.swap(growth.summary_table_);
}

const std::shared_ptr<RowBlock>& LayerStore::row_block(int64_t number, const Growth& growth) const {
  for (const auto& [changed, block] : growth.row_blocks_) {
    if (changed == number) return block;
  }
  return rows_[number];
}

void LayerStore::give_back(int64_t first, int64_t last) noexcept {
  const int64_t blocks = tokens_.segment / tokens_.rows;
  give_back_rows(first * blocks, last * blocks);
  for (int64_t s = first; s < last; ++s) {
    summaries_[s].reset();
    summary_table_[s] = nullptr;
  }
}

void LayerStore::give_back_rows(int64_t first, int64_t last) noexcept {
  for (int64_t i = first; i < last; ++i) {
    rows_[i].reset();
    row_table_[i] = nullptr;
  }
}

void LayerStore::drop(int64_t total, int64_t zone_begin, int64_t zone_end) noexcept {
  const auto cut = [](auto& blocks, auto& table, int64_t keep) {
    if (size_t(keep) >= blocks.size()) return;
    blocks.erase(blocks.begin() + keep, blocks.end());
    table.erase(table.begin() + keep, table.end());
  };
  cut(rows_, row_table_, BlockRange(0, total, tokens_.rows).last);
  cut(summaries_, summary_table_, BlockRange(0, total, tokens_.segment).last);
  const BlockRange zone(zone_begin, zone_end, tokens_.segment);
  for (int64_t s = zone.last; s < int64_t(summaries_.size()); ++s) {
    summaries_[s].reset();
    summary_table_[s] = nullptr;
  }
}

}  // namespace pariskv
