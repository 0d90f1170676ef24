/**
 * The inside of a Cache. The public calls are in cache.cpp (they change something) and
 * inspect.cpp (they look).
 */
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>

#include "backend/backend.h"
#include "check.h"
#include "gpu/early_copies.h"
#include "gpu/offload_pace.h"
#include "page_table.h"
#include "pariskv/cache.h"
#include "search.h"
#include "sequence.h"
#include "step_cursor.h"
#include "stop.h"
#include "tail_seeds.h"
#include "turns.h"
#include "validate.h"

namespace pariskv {

struct SavedPart;

/** A batch that was looked up. What may change is read and written in a turn on its cache. */
struct Batch::Prepared {
  const uint64_t cache;                    // Impl::number_
  const std::vector<Sequence*> sequences;  // null: a slot is idle
  mutable bool stale = false;              // one of them was removed
};

class Cache::Impl {
 public:
  Impl(Config config, const Resources& resources);

  /** A call's turn on this cache. All but a decode find layers told of all their tokens. */
  class Lock {
   public:
    enum class Layers { kTold, kUntold };
    explicit Lock(Impl& impl, Layers layers = Layers::kTold) : turns_(impl.turns_) {
      turns_.take(impl.stop_);
      if (layers == Layers::kTold) impl.cursor_.settle();
    }
    ~Lock() { turns_.pass_on(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Turns& turns_;
  };
  Verb verb(const char* name) const { return {name, config_}; }

  /**
   * A call's stay on a stream. Work that the device is given meanwhile comes after all that
   * earlier calls gave it, and before all that later ones will. All but a decode may change
   * sequences, so that what is known of their next steps ends.
   */
  class Visit {
   public:
    enum class Steps { kEnd, kGoOn };
    Visit(Impl& impl, Stream stream, Steps steps = Steps::kEnd);
    ~Visit() { backend_.leave(stream_); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    Backend& backend_;
    const Stream stream_;
  };

  /** Whether a call knows slots without a sequence. */
  enum class IdleSlots { kRefused, kAllowed };
  /** The sequences of a batch, each there and each once; null: a slot is idle. */
  std::vector<Sequence*> find(const Verb& verb, const Batch& batch,
                              IdleSlots idle = IdleSlots::kRefused);
  /** The same, down to one layer of each. */
  std::vector<Layer*> find_layers(const Verb& verb, const Batch& batch, int64_t layer);

  /** Where a step's output has slots without a sequence: zeros. Of a backend without graphs. */
  void clear_idle(const Slots& slots, const DecodeArgs& args, Stream stream);

  Batch prepared(const Verb& verb, std::vector<SequenceId> ids);
  void remove(SequenceId id);

  SequenceView view(const Layer& layer) const { return layer.view(sizes_, *search_); }

  /** Some layers on their way to what is planned for them. */
  struct Step {
    std::vector<Change> changes;
    std::vector<SequenceView> views;  // as they will be
    bool offloads_at_once = false;    // rows that are done changing: not a few beside each step
    bool encoded = false;             // `before` brings the summaries of what enters the zone
    bool recorded = false;            // its decode is a replay: rows are given back before it runs
  };
  using Also = std::function<void(Step&)>;
  /** @param also  does more that may run out of memory, and may be called again with other plans */
  Step plan(const std::vector<Layer*>& layers, const std::vector<Regions>& next,
            const Planner::Purpose& purpose, Stream stream, const Also& also = {});
  /** What a layer's sequences decide together, with so many tokens more. */
  StepBatch batch_of(const BatchLayer& at, int64_t tokens) const;

  /**
   * Gives the search the queries that it wants of those that a step's tokens came with.
   * @param q          packed, as the tokens are
   * @param first_row  (changes) of each change's tokens
   */
  void observe(const Step& step, const TensorView& q, const std::vector<int64_t>& first_row,
               Stream stream);

  /** Queries that tokens come with, and how logits are made of them. */
  struct Queries {
    TensorView q;
    Logits logits;
  };

  /** Remembers the last of a step's queries, where the search looks back at them. */
  void remember(const Step& step, const Queries& queries, const std::vector<int64_t>& first_row,
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
        Change& change = step.changes[i];
        const Positions freed = step.recorded ? change.freed : Positions{};
        change.publish(step.views[i], freed, backend_->word_updates());
      }
      send_words(stream);
      before();
      enter(step, stream);
      copy_tail_rows(step, stream);
      choose(step, stream);
      after();
      mark_for_offload(step);
      if (step.offloads_at_once) offload_pace_.start_all(stream);
    } catch (...) {
      for (Change& change : step.changes) change.drop();
      throw;
    }
    for (Change& change : step.changes) {
      change.apply();
      stats_.keeps += change.work.chooses();
      if (change.entering() <= 0 || step.encoded || search_->needs().summary_bytes == 0) continue;
      stats_.encoded_keys += change.entering() * config_.kv_heads;
    }
  }

  /** K and V of new tokens: tensors to be copied, or where borrowed rows lie. */
  struct NewRows {
    TensorView k, v;
    const RowAddresses* borrowed = nullptr;
    const PagedRows* paged = nullptr;          // what is filled of a page table
    std::vector<int64_t>* unserved = nullptr;  // numbers of sequences that it does not serve
  };
  void check_new_rows(const Verb& verb, const NewRows& rows, int64_t tokens) const;
  /** The same of a step. */
  void check_new_rows(const Verb& verb, const NewRows& rows, const Slots& slots) const;

  /** Rows of positions from `begin` on come to the sequences' segments. */
  void append(const std::vector<SequenceView>& views, const std::vector<int64_t>& begin,
              const std::vector<int64_t>& counts, const NewRows& rows, Stream stream);

  /** The page table, for a call that asks for it by this argument. */
  PageTables& page_tables(const Verb& verb, const char* argument);
  /** Of a step that stores tokens. */
  void note_unserved(const Step& step, const NewRows& rows) const;

  /** Notes where borrowed rows lie; the first one is number `packed` of the addresses. */
  void set_addresses(void* const* blocks, const Positions& positions, const RowAddresses& rows,
                     int64_t packed) const;

  /** Tokens that a call brings, packed: for each layer that gets any. */
  struct Arrivals {
    std::vector<Layer*> layers;
    std::vector<int64_t> begin, counts, first_row;  // positions; tokens; rows of the packed tensors
  };
  static Arrivals arrivals_of(const std::vector<Layer*>& layers,
                              const std::vector<int64_t>& lengths);

  /**
   * Appends tokens, after which layers are as in `next`; then `after(step)` runs on them.
   * @param queries  of the tokens, for the search; null: there are none
   */
  template <typename After>
  void store(const Arrivals& arrivals, const std::vector<Regions>& next, const NewRows& rows,
             const Queries* queries, After after, Stream stream) {
    limit_waiting_offloads(stream);
    Step step = plan(arrivals.layers, next, {Planner::Use::kStore, queries != nullptr}, stream);
    step.offloads_at_once = true;
    const auto append = [&] {
      if (rows.paged != nullptr) note_unserved(step, rows);
      this->append(step.views, arrivals.begin, arrivals.counts, rows, stream);
      if (queries == nullptr) return;
      observe(step, queries->q, arrivals.first_row, stream);
      remember(step, *queries, arrivals.first_row, stream);
    };
    carry_out(step, append, [&] { after(step); }, stream);
  }

  /** A layer of a saved sequence, into an empty one. */
  void restore(Layer& layer, const SavedPart& part, Stream stream);

  /** What decode and attend are given; without tokens to append, rows are empty. */
  struct StepTensors {
    TensorView q, out;
    NewRows rows;
  };
  /** The output may lie where the queries lie; apart from that every tensor has its own memory. */
  static void check_apart(const Verb& verb, const StepTensors& tensors, const TensorView& lse,
                          const TensorView& error);
  void prefill(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
               const NewRows& rows, const PrefillOptions& options, Stream stream);
  void decode(int64_t layer, const Batch& sequences, const StepTensors& tensors, bool appends,
              const AttendOptions& options, Stream stream);
  /** Checked already. */
  DecodeArgs decode_args(const Verb& verb, int64_t layer, const Slots& slots,
                         const StepTensors& tensors, bool appends, const AttendOptions& options);
  /** Rows of a step's tokens, where it does not append them by itself. */
  void append_step(const Slots& slots, const std::vector<SequenceView>& views,
                   const DecodeArgs& args, const NewRows& rows, Stream stream);
  void launch_step(const Slots& slots, const std::vector<SequenceView>& views, DecodeArgs args,
                   Stream stream);

  /** A decode beside kernels that read pages. */
  void decode_paged(DecodeArgs args, Stream stream);

  /** What a step does besides counting tokens. */
  struct StepWork {
    using OfViews = std::function<void(const std::vector<SequenceView>&)>;
    DecodeArgs args;  // that memory is reserved for, of the first layer
    OfViews append;   // of (slots), before keys enter zones; none: rows come with the launch
    OfViews launch;   // of (slots); none: a replay will
    bool sets_lengths = false;  // of the page table's rows, for that replay
  };
  /** The cursor follows these layers of the batch: as before, or looked up now. */
  void open_step(const Verb& verb, const Batch& batch, LayerRange range);
  /** A step that adds so many tokens to each sequence, one or none. */
  void take_step(LayerRange range, int64_t tokens, const StepWork& work, Stream stream);
  /** Of sequences that a step attends to in full, once they have so many tokens more. */
  void set_lengths(const std::vector<bool>& in_full, int64_t tokens, Stream stream);
  struct PlannedStep;
  /** Plans layers that are due; of the others the device will count the tokens. */
  void plan_step(PlannedStep& planned, int64_t tokens, const StepWork& work, Stream stream);
  void take_planned_step(LayerRange range, int64_t tokens, const StepWork& work, Stream stream);
  /** A step failed: the device may have counted its tokens or not. */
  void forget(LayerRange range) noexcept;
  void attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
              const StepTensors& tensors, bool appends, const AttendOptions& options,
              Stream stream);

  /** A layer that is cut; throws where the window would lack rows. */
  Regions shortened(const Verb& verb, const char* argument, Cut::Counts counts, const Layer& layer,
                    SequenceId sequence, int64_t tokens) const;
  struct Shorter;
  /** Makes layers shorter: all of them, or none. */
  void cut(std::vector<Shorter>& layers, Stream stream);

  /** All layers of these sequences, or none. */
  void flush(const std::vector<Sequence*>& sequences, Stream stream);

  /** The arguments that every decode of a layer has in common. */
  DecodeArgs decode_args(int64_t layer) const;

  /**
   * Marks rows of zones for host memory to make room on the device, those of the sequences first
   * that no call has named for longest; false: there are none.
   */
  bool spill();
  bool spills() const {
    return config_.placement == Placement::kAuto && backend_->host_arena() != nullptr;
  }

  /**
   * Before the device is full: copies rows of sequences that rest to host memory, a few at a time,
   * where room and copies together are less than a quarter of the budget; and forgets where copied
   * ones were where room is less than a sixteenth. Never waits.
   */
  void keep_room(Stream stream);
  /** Whether no call has named it for a while. */
  bool rests(const Sequence& sequence) const;

  /**
   * Marks rows that are in host memory for the device, where an eighth of the budget is free beside
   * them: those of the sequences first that a call named last.
   */
  void bring_back();

  /**
   * What `make` makes, again and again while it runs out of memory and rows can make room. It may
   * not go by what was made before: rows have moved.
   */
  template <typename Make>
  auto making_room(Stream stream, Make make) {
    for (bool trimmed = false;;) {
      try {
        return make();
      } catch (const OutOfMemory&) {
        if (offload_pace_.size() > 0 || forget_any(stream) || spill()) {
          trimmed = false;
        } else if (trimmed || !spills()) {
          throw;
        } else {
          trimmed = true;
        }
      }
      // Rows on their way to host memory hold room on the device until they have arrived, and the
      // room of rows is none for blocks of another size until it is given back.
      if (trimmed) {
        backend_->trim();
      } else {
        finish_offloads(offload_pace_.size(), stream);
      }
    }
  }

  /** Waits for copies to host memory when too many rows wait for them. */
  void limit_waiting_offloads(Stream stream);

  /** Starts a few of the copies to host memory that are due, beside a decode step. */
  void offload_beside(const Step& step, Stream stream);

  /** Sends a layer's view to the device as it is, for verbs that only look. */
  void publish(Layer& layer, Stream stream);

  /** Sends noted words of device tables, where the backend keeps any. */
  void send_words(Stream stream) {
    if (WordUpdates* updates = backend_->word_updates()) updates->send_words(stream);
  }

  const Config config_;
  std::unique_ptr<Backend> backend_;  // before all that holds its memory
  std::unique_ptr<Search> search_;
  const ModelShape& shape_;  // with what the search adds
  const RegionSizes sizes_;
  Planner planner_;
  TailSeeds tail_seeds_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_id_ = 0;
  StepCursor cursor_;
  std::optional<PageTables> page_tables_;
  int64_t calls_ = 0;      // that named sequences
  const uint64_t number_;  // no other cache of this process has it
  std::vector<std::weak_ptr<const Batch::Prepared>> batches_;
  Stats stats_;  // the counters; sizes are added up when asked
  const StopCheck stop_;
  Turns turns_;

 private:
  /** Rows and keys of a step enter their zones. */
  void enter(Step& step, Stream stream);
  /** Copies rows of tails to where they lie side by side. */
  void copy_tail_rows(const Step& step, Stream stream);
  /** The changes of a step by which rows are chosen to be kept. */
  std::vector<KeptChange> choices(const Step& step) const;
  void choose(const Step& step, Stream stream);

  /** Rows that are done changing wait for their copy to host memory from now on. */
  void mark_for_offload(Step& step);

  /** Rows whose copies are done, and the `waited` oldest, are fetched from there from now on. */
  void finish_offloads(size_t waited, Stream stream);

  /** Starts copies of rows of sequences that rest, into memory that is there; false: of fewer. */
  bool copy_early(int64_t bytes, Stream stream);

  /** Whose rows may be forgotten: of sequences that all rest, or of any. */
  enum class Resting { kAlone, kAnyway };
  /** Rows that have a copy are read from there, until so many bytes are free; false: none are. */
  bool forget_copied(int64_t bytes, Resting which, Stream stream);
  /** The same of any, and waits for copies under way if it has to. */
  bool forget_any(Stream stream);

  /** Calls `act(sequence)` for all that hold these rows, of which the caller has one share. */
  template <typename Do>
  void each_holder(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows, Do act);
  /** All that hold these rows read them where they are now. The same. */
  void note_moved(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows);

  OffloadPace offload_pace_;
  EarlyCopies early_copies_;
  int64_t look_again_ = 0;  // calls; before, there is nothing more to copy early
};

}  // namespace pariskv
