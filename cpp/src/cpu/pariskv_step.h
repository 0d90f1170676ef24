/**
 * ParisKV on the CPU: its upkeep of summaries, and its search between attention to resident and to
 * selected rows. Each verb is in verbs/, in the file of its name.
 */
#pragma once

#include <vector>

#include "cpu/search.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "policy/upkeep.h"

namespace pariskv::cpu {

class ParisKVStep {
 public:
  ParisKVStep(const Kernels& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  /** Cuts the arrays of all sparse sequences of a step from scratch, or measures them. */
  void cut(const DecodeArgs& args, const ParisKVRules& rules, const Selection& selection,
           Cutter& cutter);

  /** Fills the selection of the step that was cut last. */
  void search(const DecodeArgs& args, const ParisKVRules& rules, const Running& running);

  /** Adds the numbers of the last search. */
  void count(const ModelShape& shape, DecodeCounts& counts) const;

  /** The path of the last search, of its first sequence. */
  Trace trace(const DecodeArgs& args, const ParisKVRules& rules) const;

  void keep_up(const ParisKVEncode& args);
  void keep_up(const ParisKVForget& args);
  void keep_up(const ParisKVObserve& args);

 private:
  void prepare_query(const SearchArgs& args);
  void list_tail(const SearchArgs& args);
  void score(const SearchArgs& args);
  void select(const SearchArgs& args);
  void rerank(const SearchArgs& args);

  const Kernels& kernels_;
  ThreadPool& pool_;
  std::vector<SearchItem> items_;  // of the last step, over the scratch
};

}  // namespace pariskv::cpu
