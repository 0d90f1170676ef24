// What the calls of a cache share: plans, carrying them out, and rows on their way to host memory.
#include "cache_impl.h"

#include <algorithm>
#include <utility>

#include "pariskv/codec.h"

namespace pariskv {

namespace {

Config checked(Config config) {
  config.validate();
  return config;
}

/** Slots per kv head for rows that come over a bus. */
int64_t cached_rows(const Config& config) {
  const bool on_gpu = config.device.type == DeviceType::kCuda;
  if (!on_gpu || config.placement == Placement::kDevice) return 0;
  return row_cache_slots(config.row_cache < 0 ? 2 * config.top_k : config.row_cache);
}

ModelShape shape_of(const Config& config) {
  return {
      config.kv_heads,       config.group(), config.head_dim,    rotated_dim_of(config.head_dim),
      config.segment_tokens, config.dtype,   cached_rows(config)};
}

// A prefill waits when this much is still to be copied from earlier ones: they would fill
// the device otherwise, for computing keys is faster than the bus.
constexpr int64_t kMostLeaving = int64_t{2} << 30;

// Steps that a flush's rows are sent on their way in: far fewer than there are between flushes, and
// so many that few go at a time, for each costs the host three calls and the bus 75 microseconds.
constexpr size_t kStepsToLeave = 128;

}  // namespace

Cache::Impl::Impl(Config config, const Resources& resources)
    : config_(checked(std::move(config))),
      shape_(shape_of(config_)),
      sizes_{config_.sink, config_.local, config_.update},
      backend_(make_backend(config_, resources)),
      policy_(make_policy(config_, shape_, *backend_)),
      planner_(shape_, sizes_, *policy_, *backend_, backend_->host_arena() != nullptr) {}

Cache::Impl::Visit::Visit(Impl& impl, Stream stream) : backend_(*impl.backend_), stream_(stream) {
  backend_.enter(stream);
  try {
    impl.settle(0, stream);
    backend_.send_pokes(stream);  // words that a failed call left, while their targets are there
  } catch (...) {
    backend_.leave(stream);
    throw;
  }
}

std::vector<Sequence*> Cache::Impl::find(const Verb& verb, const std::vector<SequenceId>& ids) {
  std::vector<Sequence*> found;
  std::set<SequenceId> seen;
  for (const SequenceId id : ids) {
    const auto place = sequences_.find(id);
    if (place == sequences_.end()) {
      fail("[", verb.name, "] sequences: ", id,
           " is not a sequence of this cache (it was removed, or never added)");
    }
    if (!seen.insert(id).second) {
      fail("[", verb.name, "] sequences: expected each once, got ", id, " twice");
    }
    found.push_back(&place->second);
  }
  return found;
}

std::vector<Layer*> Cache::Impl::find_layers(const Verb& verb, const std::vector<SequenceId>& ids,
                                             int64_t layer) {
  verb.check_layer(layer);
  std::vector<Layer*> layers;
  for (Sequence* sequence : find(verb, ids)) layers.push_back(&sequence->layers[size_t(layer)]);
  return layers;
}

Cache::Impl::Step Cache::Impl::plan(const std::vector<Layer*>& layers,
                                    const std::vector<Regions>& next, Planner::Use use,
                                    Stream stream) {
  const auto plan_all = [&] {
    Step step;
    for (size_t i = 0; i < layers.size(); ++i) {
      step.changes.push_back(planner_.plan(*layers[i], next[i], use, stream));
    }
    for (const Change& change : step.changes) step.views.push_back(change.view(sizes_, *policy_));
    return step;
  };
  try {
    return plan_all();
  } catch (const OutOfMemory&) {
    if (leaving_.empty()) throw;
  }
  // Rows on their way to host memory hold room on the device until they have arrived. What was
  // planned until now is gone: it knew their old places.
  settle(leaving_.size(), stream);
  return plan_all();
}

void Cache::Impl::encode(Step& step, Stream stream) {
  std::vector<Span> spans;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    if (change.spilled() > 0) {
      spans.push_back({step.views[i], change.spill_begin, change.spill_end});
    }
  }
  if (!spans.empty()) policy_->on_spill(spans, stream);
}

void Cache::Impl::offload(Step& step) {
  size_t count = leaving_.size();
  for (const Change& change : step.changes) count += change.leaving.size();
  leaving_.reserve(count);
  for (Change& change : step.changes) {
    for (Leave& leave : change.leaving) {
      if (leave.rows->leaving()) continue;  // a fork in this step has done it already
      leave.rows->leave(std::move(leave.target));
      leaving_.push_back({leave.rows, leave.segment, leave.rows->bytes()});
    }
  }
}

void Cache::Impl::depart(size_t count, Stream stream) {
  for (; departed_ < count; ++departed_) {
    const std::shared_ptr<RowBlock> rows = leaving_[departed_].rows.lock();
    if (rows) rows->depart(stream);
  }
}

void Cache::Impl::depart_beside(const Step& step, Stream stream) {
  bool quiet = true;
  for (const Change& change : step.changes) quiet = quiet && change.spilled() <= 0;
  const bool was_quiet = std::exchange(quiet_, quiet);
  if (!quiet || !was_quiet || departed_ > 0 || leaving_.empty()) return;
  depart(1 + leaving_.size() / kStepsToLeave, stream);
}

void Cache::Impl::publish(Layer& layer, Stream stream) {
  Block tables = layer.mirror.grown(layer.store.segments(), backend_->arena());
  layer.mirror.publish(view(layer), layer.store.segments(), tables, *backend_);
  backend_->send_pokes(stream);
}

void Cache::Impl::count_step(const Step& step) {
  for (size_t i = 0; i < step.changes.size(); ++i) {
    stats_.flushes += step.changes[i].spilled() > 0;
    stats_.searched_tokens += step.views[i].searched();
  }
  stats_.decode_tokens += int64_t(step.changes.size());
}

DecodeArgs Cache::Impl::decode_args(int64_t layer) const {
  DecodeArgs args{};
  args.shape = shape_;
  args.rules = policy_->rules();
  args.layer = layer;
  return args;
}

void Cache::Impl::settle(size_t waited, Stream stream) {
  depart(waited, stream);
  size_t done = 0;
  for (; done < leaving_.size(); ++done) {
    const Leaving& leaving = leaving_[done];
    const std::shared_ptr<RowBlock> rows = leaving.rows.lock();
    if (!rows || !rows->leaving()) continue;
    if (!rows->settle(done < waited)) break;
    for (auto& [id, sequence] : sequences_) {
      for (Layer& layer : sequence.layers) {  // forks share it
        if (leaving.segment >= layer.store.segments() ||
            layer.store.row_block(leaving.segment) != rows) {
          continue;
        }
        layer.store.row_moved(leaving.segment);
        layer.mirror.publish_row(leaving.segment, rows->data(), *backend_);
      }
    }
  }
  if (done == 0) return;
  leaving_.erase(leaving_.begin(), leaving_.begin() + std::ptrdiff_t(done));
  departed_ -= std::min(done, departed_);
  backend_->send_pokes(stream);
}

void Cache::Impl::keep_pace(Stream stream) {
  int64_t bytes = 0;
  for (const Leaving& leaving : leaving_) bytes += leaving.bytes;
  size_t waited = 0;
  while (bytes > kMostLeaving) bytes -= leaving_[waited++].bytes;
  if (waited > 0) settle(waited, stream);
}

}  // namespace pariskv
