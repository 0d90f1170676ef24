// HARD-KV's choice of the rows that are kept.
#include <algorithm>

#include "cpu/choice.h"
#include "cpu/hardkv_step.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

ObserveRules observe_rules(const HardKVRules& rules) { return {false, false, rules.pool, 0, {}}; }

/** How many rows a head keeps, which ones, and their copies. */
void choose(const HardKVKeep& args, const KeptChange& change, const Choice& choice, int64_t head) {
  int64_t keep = args.rules.most;
  if (choice.heard[head] != 0 && args.rules.p != 1 << kTopPBits) {
    uint64_t* shares = choice.shares + head * choice.width;
    keep = top_p_count(shares, choice.counts[head], args.rules.p, args.rules.most);
  }
  take_best(choice, head, std::max(keep, args.rules.least), 1);
  fill_kept(args.shape, change, choice, head, args.rules.patience);
}

}  // namespace

int64_t HardKVStep::scratch_bytes(const HardKVKeep& args) const {
  return choice_bytes(args.shape, observe_rules(args.rules), args.changes, args.batch);
}

void HardKVStep::keep_up(const HardKVKeep& args) {
  const ObserveRules rules = observe_rules(args.rules);
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (change.cut()) {
      pool_.parallel_for(args.shape.kv_heads,
                         [&](int64_t head) { trim_kept(args.shape, change, head); });
      continue;
    }
    Cutter cutter(scratch_.as<char>());
    const Choice choice = Choice::cut(args.shape, rules, most_rows(rules, change), cutter);
    observe(kernels_, pool_, args.shape, rules, change, choice);
    pool_.parallel_for(args.shape.kv_heads,
                       [&](int64_t head) { choose(args, change, choice, head); });
  }
}

void HardKVStep::search(const DecodeArgs& args, const HardKVRules&, const Running& running) {
  std::fill_n(running.selection.count, args.batch * args.shape.kv_heads, 0);
}

Trace HardKVStep::trace(const DecodeArgs& args, const HardKVRules&) const {
  const SequenceView& sequence = args.sequences[0];
  return HardKVTrace{kept_positions(args.shape, sequence, false),
                     kept_positions(args.shape, sequence, true)};
}

}  // namespace pariskv::cpu
