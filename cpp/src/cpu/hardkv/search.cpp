// HARD-KV's choice of the rows that are kept.
#include <algorithm>

#include "cpu/hardkv/search.h"
#include "cpu/kept/choice.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

ObserveRules observe_rules(const HardKVRules& rules) { return {false, false, rules.pool, 0, {}}; }

/** How many rows a head keeps, which ones, and their copies. */
void choose_rows(const ModelShape& shape, const HardKVRules& rules, const KeptChange& change,
                 const Choice& choice, int64_t head) {
  int64_t keep = rules.most;
  if (choice.has_queries[head] != 0 && rules.p != 1 << kTopPBits) {
    uint64_t* shares = choice.shares + head * choice.width;
    keep = top_p_count(shares, choice.counts[head], rules.p, rules.most);
  }
  take_best(choice, head, std::max(keep, rules.least), 1);
  fill_kept(shape, change, choice, head, rules.patience);
}

}  // namespace

void HardKVSearch::reserve_choice(const std::vector<KeptChange>& changes) {
  step_.scratch().reserve(
      choice_bytes(shape_, observe_rules(rules_), changes.data(), int64_t(changes.size())));
}

void HardKVSearch::choose(const std::vector<KeptChange>& changes, Stream) {
  const ObserveRules rules = observe_rules(rules_);
  for (const KeptChange& change : changes) {
    if (change.trims) {
      device_.pool.parallel_for(shape_.kv_heads,
                                [&](int64_t head) { trim_kept(shape_, change, head); });
      continue;
    }
    Cutter cutter(step_.scratch().data());
    const Choice choice = Choice::cut(shape_, rules, most_rows(rules, change), cutter);
    pariskv::cpu::observe(device_.kernels, device_.pool, shape_, rules, change, choice);
    device_.pool.parallel_for(
        shape_.kv_heads, [&](int64_t head) { choose_rows(shape_, rules_, change, choice, head); });
  }
}

void HardKVSearch::find(const DecodeArgs& args, const Running& running) {
  std::fill_n(running.selection.count, args.batch * args.shape.kv_heads, 0);
}

HardKVTrace HardKVSearch::trace(const DecodeArgs& args) {
  const SequenceView& sequence = args.sequences[0];
  return {kept_positions(shape_, sequence, false), kept_positions(shape_, sequence, true)};
}

}  // namespace pariskv::cpu
