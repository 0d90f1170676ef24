/**
 * A decode step on the CPU, whatever the policy: attention to resident and kept rows, the rows that
 * a search finds, attention to these and to the tail.
 */
#pragma once

#include "cpu/device.h"
#include "cpu/running.h"
#include "search.h"

namespace pariskv::cpu {

/** The part of a step that is a search's own. The defaults are of a search that finds nothing. */
class Finder {
 public:
  virtual ~Finder() = default;

  /** Cuts the arrays of all sequences that are not dense of a step from scratch, or measures them.
   */
  virtual void cut(const DecodeArgs&, const Selection&, Cutter&) {}

  /** Whether a step wants to know what its tail has of the outputs. */
  virtual bool weighs_tail(const DecodeArgs&) const { return false; }

  /** Fills the selection of the step that was cut last. */
  virtual void find(const DecodeArgs& args, const Running& running) = 0;

  /** When the step has attended to the selection. */
  virtual void judge(const DecodeArgs&, const Running&) {}

  /** Adds the numbers of the last search. */
  virtual void count(DecodeCounts&) const {}
};

class Step {
 public:
  Step(const CpuDevice& device, const Needs& needs)
      : device_(device), needs_(needs), scratch_(device.arena) {}

  void reserve(const DecodeArgs& args, Finder& finder);
  void run(const DecodeArgs& args, Finder& finder);

  Scratch& scratch() { return scratch_; }
  const Scratch& scratch() const { return scratch_; }
  const DecodeCounts& counts() const { return counts_; }

 private:
  /** Cuts the scratch of a decode, or measures it. */
  Running cut(const DecodeArgs& args, Finder& finder, Cutter& cutter) const;

  void attend_resident(const DecodeArgs& args, const Running& running);
  void attend_selected(const DecodeArgs& args, const Running& running);
  void count(const DecodeArgs& args, const Running& running, const Finder& finder);

  const CpuDevice device_;
  const Needs& needs_;
  Scratch scratch_;
  DecodeCounts counts_;
};

/** Writes queries to where they are remembered. */
void remember(const CpuDevice& device, const RememberArgs& args);

/** The same of a step's own tokens; the call is not told to stop meanwhile. */
void remember_step(const CpuDevice& device, const DecodeArgs& args);

/** A policy on the CPU: the calls that all of them answer alike. */
template <typename Policy>
class CpuSearch : public Policy, protected Finder {
 public:
  template <typename... Settings>
  explicit CpuSearch(const CpuDevice& device, Settings&&... settings)
      : Policy(std::forward<Settings>(settings)...),
        device_(device),
        step_(device, this->needs()) {}

  void remember(const RememberArgs& args, Stream) override { cpu::remember(device_, args); }
  void reserve(const DecodeArgs& args) override { step_.reserve(args, *this); }
  void decode(const DecodeArgs& args, Stream) override { step_.run(args, *this); }
  DecodeCounts counts() override { return step_.counts(); }
  int64_t scratch_bytes() const override { return step_.scratch().taken(); }
  void clear_scratch(Stream) override { step_.scratch().clear(); }

 protected:
  const CpuDevice device_;
  Step step_;
};

}  // namespace pariskv::cpu
