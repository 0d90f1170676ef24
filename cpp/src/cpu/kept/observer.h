/** What attention the last queries pay to rows, one kv head after the other. Whole numbers. */
#pragma once

#include "cpu/kept/choice.h"
#include "observe.h"
#include "octaves.h"
#include "policy/prkv/rules.h"

namespace pariskv::cpu {

class Observer {
 public:
  Observer(const Kernels& kernels, ThreadPool& pool, const ModelShape& shape,
           const ObserveRules& rules, const KeptChange& change, const Choice& choice)
      : kernels_(kernels),
        pool_(pool),
        shape_(shape),
        rules_(rules),
        change_(change),
        choice_(choice) {}

  void run();

 private:
  static constexpr int64_t kTile = 64;           // rows of a task
  static constexpr int64_t kQueriesAtOnce = 64;  // heads of queries in one pass over a tile
  static constexpr int32_t kMostLogit = int32_t(kMostSteps);  // of a part of a logit, in steps
  static constexpr int32_t kNoCap = 1 << 29;                  // above any sum of such parts

  /** Some of a head's, by number. */
  struct Askers {
    int64_t begin, end;
  };

  void list(int64_t head);
  void gather(int64_t head);
  void gather(int64_t first, int64_t last);
  void set_reference(int64_t head);
  void set_offsets(int64_t queries);
  void observe_head(int64_t head);
  template <typename SetLogits>
  void look(int64_t head, SetLogits set_logits);
  void compare(int64_t head, int64_t tiles);
  int64_t best_of(int64_t head, int64_t asker, uint64_t* best) const;
  void set_logits(int64_t head, int64_t tile, const Askers& askers, int64_t at);
  void hide(int64_t head, int64_t tile, const Askers& askers, int64_t at,
            const uint8_t* exponents) const;
  void weigh(int64_t i, int64_t count);
  void pool(const int32_t* weights, int64_t first, int64_t count, uint32_t* out) const;
  void share_out(int64_t head, int64_t tile, int64_t asking);

  // Where rows of the best pages alone are looked at: filter_pages.cpp.
  ZonePages pages() const {
    return ZonePages::of(change_.after.zone_begin, change_.after.zone_end, rules_.filter.page);
  }
  void list_pages(int64_t head);
  void set_page_logits(int64_t head, int64_t tile, const Askers& askers);
  void list_rows_of_pages(int64_t head);

  int32_t* logits_of(int64_t number, int64_t first) const {
    return choice_.logits + number * choice_.width + first;
  }
  RowPlace row(int64_t head, int64_t j) const {
    return row_to_choose(shape_, change_, choice_, head, j);
  }

  const Kernels& kernels_;
  ThreadPool& pool_;
  const ModelShape& shape_;
  const ObserveRules& rules_;
  const KeptChange& change_;
  const Choice& choice_;
  float reference_[kMaxHeadDim];      // of the head at hand, as are
  int64_t askers_ = 0, queries_ = 0;  // that have a say
};

}  // namespace pariskv::cpu
