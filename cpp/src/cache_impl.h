/**
 * What is behind a Cache. The public calls are in cache.cpp (they change something) and
 * inspect.cpp (they look).
 */
#pragma once

#include <map>
#include <mutex>
#include <set>

#include "backend.h"
#include "check.h"
#include "pariskv/cache.h"
#include "policy/policy.h"
#include "sequence.h"
#include "validate.h"

namespace pariskv {

class Cache::Impl {
 public:
  Impl(Config config, const Resources& resources);

  using Lock = std::lock_guard<std::mutex>;
  Verb verb(const char* name) const { return {name, config_}; }

  /**
   * A call's stay on a stream. What the device is given meanwhile comes after all that
   * earlier calls gave it, and before all that later ones will.
   */
  class Visit {
   public:
    Visit(Impl& impl, Stream stream);
    ~Visit() { backend_.leave(stream_); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    Backend& backend_;
    const Stream stream_;
  };

  /** The sequences of a batch, each there and each once. */
  std::vector<Sequence*> find(const Verb& verb, const std::vector<SequenceId>& ids);

  /** The same, down to one layer of each. */
  std::vector<Layer*> find_layers(const Verb& verb, const std::vector<SequenceId>& ids,
                                  int64_t layer);

  SequenceView view(const Layer& layer) const { return layer.view(sizes_, *policy_); }

  /** Some layers on their way to what is planned for them. */
  struct Step {
    std::vector<Change> changes;
    std::vector<SequenceView> views;  // as they will be
    bool sends = false;               // rows that are done changing leave at once, not by and by
  };
  Step plan(const std::vector<Layer*>& layers, const std::vector<Regions>& next, Planner::Use use,
            Stream stream);

  /**
   * Does the work of a step and then makes it the cache's state. `before` runs when the
   * device knows of the next state, `after` when its keys are encoded. When anything throws,
   * the state stays as it was.
   */
  template <typename Before, typename After>
  void carry_out(Step& step, Before before, After after, Stream stream) {
    try {
      for (size_t i = 0; i < step.changes.size(); ++i) {
        step.changes[i].publish(step.views[i], *backend_);
      }
      backend_->send_pokes(stream);
      before();
      encode(step, stream);
      after();
      offload(step);
      if (step.sends) depart(leaving_.size(), stream);
    } catch (...) {
      for (Change& change : step.changes) change.drop();
      throw;
    }
    for (Change& change : step.changes) {
      change.apply();
      if (change.spilled() > 0) stats_.encoded_keys += change.spilled() * config_.kv_heads;
    }
  }

  /** A layer with one token more, flushed when that is due. */
  Regions grown(const Layer& layer) const {
    const Regions next = layer.regions.appended();
    return next.flush_due(sizes_) ? next.flushed(sizes_) : next;
  }

  void count_step(const Step& step);

  /** What every decode of a layer has in common. */
  DecodeArgs decode_args(int64_t layer) const;

  /** Waits until host memory is not too far behind. */
  void keep_pace(Stream stream);

  /**
   * Sends a few of the rows that are to leave on their way beside a step, and none while earlier
   * ones travel, nor when this step or the one before has keys to encode, and then memory to
   * recycle: what a flush costs is spread over steps, so that none is seen to take longer.
   */
  void depart_beside(const Step& step, Stream stream);

  /** Tells the device of a layer as it is, for verbs that only look. */
  void publish(Layer& layer, Stream stream);

  const Config config_;
  const ModelShape shape_;
  const RegionSizes sizes_;
  std::unique_ptr<Backend> backend_;  // before all that holds its memory
  std::unique_ptr<Policy> policy_;
  Planner planner_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_id_ = 0;
  Stats stats_;  // the counters; sizes are added up when asked
  std::mutex mutex_;

 private:
  /** Rows of one segment on their way to host memory. */
  struct Leaving {
    std::weak_ptr<RowBlock> rows;
    int64_t segment;
    int64_t bytes;
  };

  void encode(Step& step, Stream stream);

  /** Rows that are done changing are to leave from now on. */
  void offload(Step& step);

  /** The first `count` of the rows that are to leave are on their way from now on. */
  void depart(size_t count, Stream stream);

  /** Rows whose copies are done, the `waited` oldest surely, are fetched from there from now on. */
  void settle(size_t waited, Stream stream);

  std::vector<Leaving> leaving_;  // oldest first
  size_t departed_ = 0;           // of them
  bool quiet_ = true;             // the last step encoded nothing
};

}  // namespace pariskv
