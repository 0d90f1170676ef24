/**
 * Which cells of a host's KV cache belong to which sequence. A host tells neither: its masks say
 * which cells a token attends to, and its writes say which cells have other numbers now. From both
 * the ledger makes sequences: lists of cells in the order of their arrival.
 */
#pragma once

#include <cstdint>
#include <vector>

#include "bits.h"

namespace pariskv::ggml {

/** What becomes of a slot before a step: they are carried out in order, in all layers. */
struct Change {
  enum class Kind { kAdd, kFork, kTruncate, kRemove };
  Kind kind;
  int64_t slot;
  int64_t source = -1;  // of kFork
  int64_t keep = 0;     // of kTruncate: the first tokens that stay
};

/** Whose token attends: it sees the first `tokens` cells of the slot's list. */
struct Seen {
  int64_t slot;
  int64_t tokens;
};

struct Plan {
  std::vector<Change> changes;
  std::vector<Seen> rows;
  bool serves = true;  // false: the step is the host's to compute
  int64_t rest = 0;    // above 0: a rest of so many passes begins with this step, see Ledger::rests
};

class Ledger {
 public:
  /**
   * @param cells         of the KV cache, over all of its streams
   * @param least_shared  beginnings in common that are shorter are read again rather than forked
   */
  explicit Ledger(int64_t cells, int64_t least_shared = 256)
      : stamps_(size_t(cells)),
        written_(cells),
        read_(cells),
        cells_(cells),
        least_shared_(least_shared) {}

  int64_t cells() const { return cells_; }

  /** Cells that are written from now on are newer than those before. */
  void begin_pass() { ++pass_; }
  uint32_t pass() const { return pass_; }
  /** A cell has other numbers. Writes of the same pass are one: layers come one after the other. */
  void write(int64_t cell);

  /**
   * Finds the sequence of each token of a step by the cells that it attends to.
   * @param visible  of each token, in the order of their arrival; none is empty
   */
  Plan plan(const std::vector<Bits>& visible);

  /** In the order of arrival; a step of a token sees the first of them, see Seen. */
  const std::vector<int32_t>& cells_of(int64_t slot) const { return slots_[size_t(slot)].cells; }

  /**
   * Steps are the host's for a while: their sequences were read again and again, as under a window
   * that slides over the cells, or the engine failed. Each rest that follows on another without
   * a spell of service between them is twice as long, up to a bound.
   */
  bool rests() const { return int64_t(pass_) < rest_until_; }
  /** A rest begins now. @return its passes */
  int64_t begin_rest();

  /**
   * No sequence is known any more; slots of before are gone without a Change. In which order cells
   * were written stays known.
   */
  void forget();

 private:
  struct Slot {
    bool used = false;
    Bits bits{0};
    std::vector<int32_t> cells;    // in the order of arrival
    std::vector<uint32_t> stamps;  // of their last write, as the sequence knows them
    int64_t base = 0;              // tokens that it had before the plan that is being made
    bool damaged = false;          // a cell may have been written since
    int64_t last_plan = 0;
  };

  int64_t intact(const Slot& slot, const Bits& visible) const;
  Seen place(const Bits& visible, Plan& plan);
  int64_t new_slot(Plan& plan, const Change& change);
  void truncate(int64_t index, int64_t keep);
  bool is_overwritten(const Slot& slot, int64_t token) const;
  bool is_in_another(size_t index) const;
  void remove(size_t index, Plan& plan);
  void drop_overwritten(Plan& plan);
  void drop_oldest(Plan& plan);
  void weigh_reading(Plan& plan, const std::vector<int64_t>& before);

  std::vector<Slot> slots_;
  std::vector<uint32_t> stamps_;  // (cells) the pass that wrote each last
  Bits written_;                  // since the last plan
  Bits read_;                     // into a sequence since they were written
  uint32_t pass_ = 1;
  int64_t cells_ = 0, least_shared_ = 0;
  int64_t plans_ = 0;
  int64_t again_ = 0;  // cells that this plan reads although they had been read
  double debt_ = 0;    // whole sequences that were read again and not paid for, see weigh_reading
  int64_t rest_until_ = 0, next_rest_ = 0;  // passes
};

}  // namespace pariskv::ggml
