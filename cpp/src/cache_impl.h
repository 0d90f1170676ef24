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
#include "memory/arena.h"
#include "pariskv/cache.h"
#include "policy/policy.h"
#include "policy/workspace.h"
#include "sequence.h"
#include "validate.h"

namespace pariskv {

class Cache::Impl {
 public:
  Impl(Config config, Resources resources);

  using Lock = std::lock_guard<std::mutex>;
  Verb verb(const char* name) const { return {name, config_}; }

  /** The sequences of a batch, each there and each once. */
  std::vector<Sequence*> find(const Verb& verb, const std::vector<SequenceId>& ids);

  /** The same, down to one layer of each. */
  std::vector<Layer*> find_layers(const Verb& verb, const std::vector<SequenceId>& ids,
                                  int64_t layer);

  SequenceView view(const Layer& layer) const { return layer.view(sizes_, *policy_); }

  /** Applies planned changes; rows that spill are already in place, or put there by `append`. */
  template <typename Append>
  void apply(std::vector<Change>& changes, Append append, Stream stream) {
    for (Change& change : changes) change.apply();
    append();
    for (const Change& change : changes) {
      if (change.spilled() == 0) continue;
      policy_->on_spill({view(*change.layer), change.spill_begin, change.spill_end}, stream);
      stats_.encoded_keys += change.spilled() * config_.kv_heads;
    }
  }

  /** Scratch of one attention over `tokens` queries, one per sequence. */
  struct Running {
    float* maximum;
    float* sum;
    float* weighted;
    int32_t* selected;
    int64_t* selected_count;
  };

  /** One token of each of some sequences, on its way through the verbs. */
  struct Step {
    std::vector<SequenceView> views;     // (batch)
    std::vector<SequenceView> searched;  // those of them that search,
    std::vector<int64_t> rows;           // and where in the batch they are
    Running running;
  };

  Running cut_running(Cutter& cutter, const Step& step) const;

  /**
   * Sees to everything that a step over `views` will need, so that taking it cannot fail.
   * The views may be of what is to come: only their sizes count.
   */
  Step prepare(std::vector<SequenceView> views);

  /** Looks again at the layers of a prepared step, now that they are as was planned. */
  void refresh(Step& step, const std::vector<Layer*>& layers) const;

  /** Queries of a prepared step over what is resident and what the policy selects. */
  SelectCounts attend(const Step& step, const TensorView& q, const TensorView& out,
                      const Logits& logits, const TensorView& lse, Stream stream);

  const Config config_;
  const ModelShape shape_;
  const RegionSizes sizes_;
  Arena arena_;  // before all that holds its blocks
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Policy> policy_;
  Planner planner_;
  Workspace workspace_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_id_ = 0;
  Stats stats_;  // the counters; sizes are added up when asked
  std::mutex mutex_;
};

}  // namespace pariskv
