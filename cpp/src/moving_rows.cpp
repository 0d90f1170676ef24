// Rows on their way to host memory, and back.
#include <algorithm>
#include <functional>
#include <utility>

#include "cache_impl.h"

namespace pariskv {

namespace {

/** Bytes of rows that leave the device at once, or come back. */
constexpr int64_t kMostMoved = int64_t{64} << 20;

/**
 * Bytes of early copies under way. The host gives a GPU all layers of a prompt at once and then
 * waits for it, and a copy comes after the call that started it: a step's calls have to start as
 * much as a step of many tokens stores.
 */
constexpr int64_t kMostEarly = int64_t{1} << 30;

/** Shares of a budget, one part in so many: */
constexpr int64_t kFree = 16;   // is kept free, by forgetting rows that have a copy
constexpr int64_t kCopied = 4;  // is free or has a copy
constexpr int64_t kAtOnce = 8;  // leaves at once at most, and stays free of rows that come back

/** Blocks of rows in use again that a call looks at for such that may be forgotten. */
constexpr int64_t kMostStaying = 64;

/** Calls for each layer that have not named a sequence once it rests: a step is one, or some. */
constexpr int64_t kRestingCalls = 16;

struct Known {
  SequenceId id;
  Sequence* sequence;
};

/** Sequences by when a call named them last, of those that `wanted` says yes to. */
template <typename Sequences, typename Before, typename Wanted>
std::vector<Known> by_use(Sequences& sequences, Before before, Wanted wanted) {
  std::vector<Known> sorted;
  for (auto& [id, sequence] : sequences) {
    if (wanted(sequence)) sorted.push_back({id, &sequence});
  }
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Known& a, const Known& b) {
    return before(a.sequence->used, b.sequence->used);
  });
  return sorted;
}

constexpr auto kAny = [](const Sequence&) { return true; };

/**
 * Calls `visit(place, rows)` for rows of a zone that are on the device and stay there, until it
 * returns false: from segment `left` of the sequence on, which then is the first with such rows.
 */
template <typename Visit>
bool each_staying(const Known& known, const ModelShape& shape, const RegionSizes& sizes,
                  Visit visit) {
  Sequence& sequence = *known.sequence;
  const int64_t tokens = shape.segment_tokens;
  for (bool goes_on = true; goes_on; ++sequence.left) {
    const int64_t segment = sequence.left;
    goes_on = false;
    for (size_t l = 0; l < sequence.layers.size(); ++l) {
      Layer& layer = sequence.layers[l];
      if ((segment + 1) * tokens > layer.regions.retrieval_end(sizes)) continue;
      goes_on = true;
      if (segment * tokens < layer.regions.sink_end(sizes)) continue;
      const std::shared_ptr<RowBlock>& rows = layer.zone_rows(shape).row_block(segment);
      if (!rows || rows->offloaded() || rows->leaving()) continue;
      if (!visit(RowsPlace{known.id, int64_t(l), segment}, rows)) return false;
    }
    if (!goes_on) return true;
  }
  return true;
}

}  // namespace

bool Cache::Impl::rests(const Sequence& sequence) const {
  return calls_ - sequence.used > kRestingCalls * config_.layers;
}

bool Cache::Impl::spill() {
  if (!spills()) return false;
  const int64_t budget = config_.memory_budget;
  const int64_t at_once = budget > 0 ? std::min(budget / kAtOnce, kMostMoved) : kMostMoved;
  int64_t bytes = 0;
  const auto mark = [&](const RowsPlace& place, const std::shared_ptr<RowBlock>& rows) {
    if (bytes >= at_once) return false;
    Block target = backend_->host_arena()->allocate(rows->bytes());
    offload_pace_.make_room(1);
    offload_pace_.mark(place, rows, std::move(target));
    bytes += rows->bytes();
    return true;
  };
  for (const bool again : {false, true}) {
    for (const Known& known : by_use(sequences_, std::less<>(), kAny)) {
      if (again) known.sequence->left = 0;  // some have come back to the device
      if (!each_staying(known, shape_, sizes_, mark)) return true;
    }
    if (bytes > 0) return true;
  }
  return false;
}

void Cache::Impl::keep_room(Stream stream) {
  if (!spills()) return;
  const MemoryUse use = backend_->arena().use();
  if (use.budget == 0) return;
  const int64_t free = use.budget - use.live;
  early_copies_.look();
  const int64_t kept_free = use.budget / kFree, at_once = use.budget / kAtOnce;
  if (free < kept_free) forget_copied(kept_free - free, Resting::kAlone, stream);
  early_copies_.start(stream);  // of a failed call
  const bool wanted = free + early_copies_.done_bytes() < use.budget / kCopied;
  if (!wanted || calls_ < look_again_) return;
  if (early_copies_.under_way_bytes() >= std::min(at_once, kMostEarly)) return;
  if (!copy_early(std::min(at_once, kMostMoved), stream)) look_again_ = calls_ + config_.layers;
}

bool Cache::Impl::copy_early(int64_t most, Stream stream) {
  Arena& host = *backend_->host_arena();
  const auto mark = [&](const RowsPlace& place, const std::shared_ptr<RowBlock>& rows) {
    // Memory that is not ready is not taken: mapping it would hold the call up.
    if (most <= 0 || host.ready(rows->bytes()) == 0) return false;
    early_copies_.mark(place, rows, host.allocate(rows->bytes()));
    most -= rows->bytes();
    return true;
  };
  const auto resting = [&](const Sequence& sequence) { return rests(sequence); };
  for (const Known& known : by_use(sequences_, std::less<>(), resting)) {
    if (!each_staying(known, shape_, sizes_, mark)) break;
  }
  early_copies_.start(stream);
  return most <= 0;
}

bool Cache::Impl::forget_copied(int64_t bytes, Resting which, Stream stream) {
  int64_t freed = 0, stayed = 0;
  for (size_t left = early_copies_.done(); left > 0 && freed < bytes; --left) {
    if (stayed == kMostStaying) break;  // later calls look at the others
    auto taken = early_copies_.take();
    if (!taken) break;
    auto& [own, rows] = *taken;
    bool awake = false;
    if (which == Resting::kAlone) {
      each_holder(own.place, rows,
                  [&](const Sequence& sequence) { awake = awake || !rests(sequence); });
    }
    if (awake) {
      early_copies_.put_back(std::move(own));
      ++stayed;
      continue;
    }
    rows->finish_offload(false);
    note_moved(own.place, rows);
    freed += own.bytes;
  }
  if (freed > 0) send_words(stream);
  return freed > 0;
}

bool Cache::Impl::forget_any(Stream stream) {
  const int64_t budget = backend_->arena().use().budget;
  while (true) {
    early_copies_.look();
    if (forget_copied(std::max(budget / kAtOnce, kMostMoved), Resting::kAnyway, stream)) {
      return true;
    }
    if (early_copies_.under_way_bytes() == 0) return false;
    early_copies_.start(stream);
    early_copies_.look(true);
  }
}

template <typename Do>
void Cache::Impl::each_holder(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows,
                              Do act) {
  int64_t left = rows.use_count() - 1;  // one is the caller's
  const auto look = [&](Sequence& sequence) {
    const LayerStore& store = sequence.layers[size_t(place.layer)].zone_rows(shape_);
    if (place.segment >= store.row_blocks() || store.row_block(place.segment) != rows) return;
    act(sequence);
    --left;
  };
  const auto owner = sequences_.find(place.sequence);
  if (owner != sequences_.end()) look(owner->second);
  for (auto other = sequences_.begin(); left > 0 && other != sequences_.end(); ++other) {
    if (other != owner) look(other->second);  // forks share them
  }
}

void Cache::Impl::note_moved(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows) {
  each_holder(place, rows, [&](Sequence& sequence) {
    Layer& layer = sequence.layers[size_t(place.layer)];
    layer.zone_rows(shape_).row_moved(place.segment);
    layer.tables.publish_row(place.segment, rows->data(), backend_->word_updates());
    const bool looks = search_->needs().steps.look_at_batch();
    if (looks || planner_.lacks_row_cache(layer)) cursor_.plan(layer);
  });
}

void Cache::Impl::bring_back() {
  if (!spills() || offload_pace_.size() > 0 || backend_->host_arena()->use().live == 0) return;
  const MemoryUse use = backend_->arena().use();
  int64_t room = std::min(use.budget - use.budget / kAtOnce - use.live, kMostMoved);
  if (room <= 0) return;
  for (const auto& [id, sequence] : by_use(sequences_, std::greater<>(), kAny)) {
    for (size_t l = 0; l < sequence->layers.size(); ++l) {
      const LayerStore& store = sequence->layers[l].zone_rows(shape_);
      if (!store.has_moved()) continue;
      for (int64_t segment = 0; segment < store.row_blocks(); ++segment) {
        const std::shared_ptr<RowBlock>& rows = store.row_block(segment);
        if (!rows || !rows->offloaded() || rows->leaving()) continue;
        room -= rows->bytes();
        if (room < 0) return;
        try {
          Block target = backend_->arena().allocate(rows->bytes());
          offload_pace_.make_room(1);
          offload_pace_.mark({id, int64_t(l), segment}, rows, std::move(target));
          sequence->left = 0;
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
      offload_pace_.mark({-1, change.layer->number, planned.segment}, planned.rows,
                         std::move(planned.target));
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
  const auto arrived = [&](const RowsPlace& place, const std::shared_ptr<RowBlock>& rows) {
    note_moved(place, rows);
  };
  if (offload_pace_.finish(waited, stream, arrived)) send_words(stream);
}

void Cache::Impl::limit_waiting_offloads(Stream stream) {
  const size_t overdue = offload_pace_.overdue();
  if (overdue > 0) finish_offloads(overdue, stream);
}

}  // namespace pariskv
