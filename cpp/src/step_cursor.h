/**
 * Decode steps of one batch, from one to the next, eager or replayed. A sequence mostly grows by a
 * token and nothing else changes: then nothing is planned, a GPU counts the token in its own
 * tables, and the layer is told when another call wants to know.
 */
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pariskv/cache.h"
#include "sequence.h"

namespace pariskv {

/** The slots of a step that have a sequence, and where they lie in its batch. */
struct Slots {
  struct Run {
    int64_t slot, first, count;  // neighbours: the first one's slot, and its number among them
  };
  int64_t all = 0;
  std::vector<Layer*> layers;    // of those that have one
  std::vector<int64_t> numbers;  // of these slots
  std::vector<Run> runs;

  /** @param batch  (slots); null: a slot is idle */
  Slots(const std::vector<Sequence*>& batch, int64_t layer);
  int64_t size() const { return int64_t(layers.size()); }
  /** All slots of a batch, of the views of those with a sequence; others have no table. */
  std::vector<SequenceView> spread(const SequenceView* views) const;
};

/** One layer of a batch, as its last step left it. Numbers `i` are those of `slots.layers`. */
struct BatchLayer {
  Slots slots;
  std::vector<SequenceView> views;    // (slots) with tokens that the layers were not told of
  std::vector<SequenceView*> places;  // (layers) their views in the device's memory
  std::vector<int64_t> quiet_until;   // (layers) lengths up to which nothing else changes
  std::vector<bool> in_full;          // (layers) attended to in full by steps, all rows near
  int64_t left = -1;     // tokens until one of them is due; -1: one is, for a step without a token
  int64_t searched = 0;  // layers of which a step selects rows

  /** Before its first step: all layers are due. */
  explicit BatchLayer(Slots of);
  SequenceView& view(size_t i) { return views[size_t(slots.numbers[i])]; }
  const SequenceView& view(size_t i) const { return views[size_t(slots.numbers[i])]; }
  /** Whether a layer has to be planned for a step that adds so many tokens: one, or none. */
  bool due(size_t i, int64_t tokens) const { return view(i).total + tokens > quiet_until[i]; }
  /** So many tokens in each layer. */
  void count(int64_t tokens);
  /** Adds up `left` and `searched`. */
  void look();
  void settle(size_t i) const noexcept;
};

/** Layers of a cache that take a step together: one, or all of them. */
struct LayerRange {
  int64_t first, count;
};

/**
 * The batch that took the last step. What is known of it holds until another call gives the device
 * work: that may change its sequences.
 */
class StepCursor {
 public:
  explicit StepCursor(int64_t layers) : all_{0, layers} {}

  /** Whether the last steps of this batch in all of these layers are known. */
  bool knows(const std::vector<SequenceId>& ids, LayerRange range) const;

  /**
   * A batch that has just been looked up. A search has slots for one batch at a time: what is known
   * of another one ends.
   * @param sequences  (slots) null: a slot is idle
   */
  void add(const std::vector<SequenceId>& ids, const std::vector<Sequence*>& sequences,
           LayerRange range);

  /** A layer of the batch, with all of its tokens. */
  BatchLayer& layer(int64_t number);

  /** Tokens until something else changes in one of these layers; -1: it does by a step without. */
  int64_t left(LayerRange range);
  /** Where these sequences have the first of the layers, in the device's memory. */
  const std::vector<SequenceView*>& places(LayerRange range) const;
  /** Pairs of a sequence and a layer of which a step selects rows. */
  int64_t searched(LayerRange range);
  /** (sequences) Whether steps attend to them in full in all layers, to rows that are near. */
  const std::vector<bool>& in_full();
  /** Of the first layer, those of all. */
  const Slots& slots() const { return layers_.front()->slots; }
  /** Tokens of a sequence in the first layer. */
  int64_t total(size_t i) const { return layers_.front()->view(i).total + unfolded_; }

  /** A step begins, in the call of this number. */
  void note(int64_t call) noexcept { call_ = call, untold_ = true; }
  /** So many tokens in each sequence, of which the layers have not been told. */
  void count(LayerRange range, int64_t tokens) noexcept;
  /** Tells the layers. */
  void settle() noexcept;
  /** The same, and then nothing is known. */
  void end() noexcept;

  /** This layer is due. */
  void plan(const Layer& layer) noexcept;
  /** Layers changed: sums over all of them are made anew. */
  void changed() noexcept { whole_.reset(); }

 private:
  bool is_whole(LayerRange range) const { return range.count == all_.count && all_.count > 1; }
  /** Of all layers together. */
  struct Whole {
    int64_t left, searched;
    std::vector<bool> in_full;
  };
  const Whole& whole();
  /** Counts whole steps in each layer. */
  void fold() noexcept;

  const LayerRange all_;
  std::vector<SequenceId> ids_;
  std::vector<Sequence*> sequences_;
  std::vector<std::optional<BatchLayer>> layers_;  // empty: of no batch
  std::optional<Whole> whole_;                     // as of the last fold
  int64_t unfolded_ = 0;  // tokens of steps of all layers that `layers_` do not have
  int64_t call_ = 0;
  bool untold_ = false;
};

}  // namespace pariskv
