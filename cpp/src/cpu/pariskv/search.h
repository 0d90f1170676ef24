/** ParisKV on the CPU. Each verb of its search is in the file of its name. */
#pragma once

#include <vector>

#include "cpu/pariskv/items.h"
#include "cpu/step.h"
#include "policy/pariskv/policy.h"

namespace pariskv::cpu {

class ParisKVSearch final : public CpuSearch<ParisKVPolicy> {
 public:
  using CpuSearch::CpuSearch;

  void copy_tail_rows(const TailCopyArgs& args, Stream stream) override;

 private:
  void add_queries(const ObserveArgs& args, Stream stream) override;
  void encode(const EncodeArgs& args, Stream stream) override;
  void forget(const EncodeArgs& args, Stream stream) override;
  ParisKVTrace trace(const DecodeArgs& args, Stream stream) override;

  void cut(const DecodeArgs& args, const Selection& selection, Cutter& cutter) override;
  bool weighs_tail(const DecodeArgs& args) const override;
  void find(const DecodeArgs& args, const Running& running) override;
  void judge(const DecodeArgs& args, const Running& running) override;
  void count(DecodeCounts& counts) const override;

  void prepare_query(const SearchArgs& args);
  void list_tail(const SearchArgs& args);
  void score(const SearchArgs& args);
  void select(const SearchArgs& args);
  void rerank(const SearchArgs& args);

  std::vector<SearchItem> items_;  // of the last step, over the scratch
};

}  // namespace pariskv::cpu
