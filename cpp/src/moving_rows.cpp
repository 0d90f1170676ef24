// Rows on their way to host memory, and back.
#include <algorithm>
#include <functional>
#include <utility>

#include "cache_impl.h"

namespace pariskv {

namespace {

/** Bytes of rows that leave the device at once, or come back. */
constexpr int64_t kMostMoved = int64_t{64} << 20;

/** Sequences by when a call named them last. */
template <typename Sequences, typename Before>
std::vector<Sequence*> by_use(Sequences& sequences, Before before) {
  std::vector<Sequence*> sorted;
  for (auto& [id, sequence] : sequences) sorted.push_back(&sequence);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const Sequence* a, const Sequence* b) { return before(a->used, b->used); });
  return sorted;
}

}  // namespace

bool Cache::Impl::spill() {
  if (!spills()) return false;
  const int64_t budget = config_.memory_budget;
  const int64_t at_once = budget > 0 ? std::min(budget / 8, kMostMoved) : kMostMoved;
  int64_t bytes = 0;
  const int64_t tokens = shape_.segment_tokens;
  for (Sequence* sequence : by_use(sequences_, std::less<>())) {
    bool goes_on = true;
    for (int64_t segment = 0; goes_on; ++segment) {
      goes_on = false;
      for (Layer& layer : sequence->layers) {
        const int64_t end = layer.regions.retrieval_end(sizes_);
        if (bytes >= at_once || (segment + 1) * tokens > end) continue;
        goes_on = true;
        if (segment * tokens < layer.regions.sink_end(sizes_)) continue;
        const std::shared_ptr<RowBlock>& rows = layer.zone_rows(shape_).row_block(segment);
        if (!rows || rows->offloaded() || rows->leaving()) continue;
        Block target = backend_->host_arena()->allocate(rows->bytes());
        offload_pace_.make_room(1);
        offload_pace_.mark(segment, rows, std::move(target));
        bytes += rows->bytes();
      }
    }
  }
  return bytes > 0;
}

void Cache::Impl::bring_back() {
  if (!spills() || offload_pace_.size() > 0 || backend_->host_arena()->use().live == 0) return;
  const MemoryUse use = backend_->arena().use();
  int64_t room = std::min(use.budget - use.budget / 8 - use.live, kMostMoved);
  if (room <= 0) return;
  for (Sequence* sequence : by_use(sequences_, std::greater<>())) {
    for (Layer& layer : sequence->layers) {
      const LayerStore& store = layer.zone_rows(shape_);
      if (!store.has_moved()) continue;
      for (int64_t segment = 0; segment < store.row_blocks(); ++segment) {
        const std::shared_ptr<RowBlock>& rows = store.row_block(segment);
        if (!rows || !rows->offloaded() || rows->leaving()) continue;
        room -= rows->bytes();
        if (room < 0) return;
        try {
          Block target = backend_->arena().allocate(rows->bytes());
          offload_pace_.make_room(1);
          offload_pace_.mark(segment, rows, std::move(target));
        } catch (const OutOfMemory&) {
          return;  // what is free is in pieces
        }
      }
    }
  }
}

void Cache::Impl::mark_for_offload(Step& step) {
  size_t count = 0;
  for (const Change& change : step.changes) count += change.offloads.size();
  offload_pace_.make_room(count);
  for (Change& change : step.changes) {
    for (PlannedOffload& planned : change.offloads) {
      offload_pace_.mark(planned.segment, planned.rows, std::move(planned.target));
    }
  }
}

void Cache::Impl::offload_beside(const Step& step, Stream stream) {
  bool quiet = true;
  for (const Change& change : step.changes) quiet = quiet && change.entering() <= 0;
  if (quiet) bring_back();
  offload_pace_.start_beside(quiet, stream);
}

void Cache::Impl::finish_offloads(size_t waited, Stream stream) {
  const auto arrived = [&](int64_t segment, const std::shared_ptr<RowBlock>& rows) {
    for (auto& [id, sequence] : sequences_) {
      for (Layer& layer : sequence.layers) {  // forks share it
        LayerStore& store = layer.zone_rows(shape_);
        if (segment >= store.row_blocks() || store.row_block(segment) != rows) continue;
        store.row_moved(segment);
        layer.tables.publish_row(segment, rows->data(), backend_->word_updates());
        const bool looks = search_->needs().steps.look_at_batch();
        if (looks || planner_.lacks_row_cache(layer)) cursor_.plan(layer);
      }
    }
  };
  if (offload_pace_.finish(waited, stream, arrived)) send_words(stream);
}

void Cache::Impl::limit_waiting_offloads(Stream stream) {
  const size_t overdue = offload_pace_.overdue();
  if (overdue > 0) finish_offloads(overdue, stream);
}

}  // namespace pariskv
