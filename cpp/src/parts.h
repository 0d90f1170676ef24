/**
 * How parts live: a table that forks, copies, views and counts of bytes follow. docs/memory.md,
 * "The store", says where a new part has code of its own.
 */
#pragma once

#include <array>
#include <memory>

#include "memory/arena.h"
#include "ops.h"
#include "part.h"

namespace pariskv {

class Search;

/** A fork's block. */
enum class OnFork : uint8_t { kShares, kCopies, kLacks };

/** Where a part that is there changes. */
enum class OnWrite : uint8_t {
  kInPlace,
  kBeside,  // in a copy, where later work may fail; else in place
  kBehind,  // behind its content: in place if no fork shares it, else in a copy
  kAnew,    // nothing of it stays: in another block
};

struct PartRules {
  const char* name;
  Holds holds;
  OnFork on_fork;
  OnWrite on_write;
};

constexpr PartRules rules_of(Part part) {
  constexpr PartRules kRules[kPartCount] = {
      {"state", Holds::kSummaries, OnFork::kCopies, OnWrite::kBeside},
      {"row cache", Holds::kOther, OnFork::kLacks, OnWrite::kInPlace},
      {"tail copies", Holds::kKept, OnFork::kShares, OnWrite::kBehind},
      {"kept rows", Holds::kKept, OnFork::kShares, OnWrite::kAnew},
      {"recent queries", Holds::kKept, OnFork::kCopies, OnWrite::kBeside},
  };
  return kRules[int(part)];
}

struct PartSize {
  int64_t bytes;  // 0: there is no such part
  int64_t zeros;  // of them, from the first on, that are to be zero in a new one
};

/** In a layer with such a zone. */
PartSize part_size(Part part, const ModelShape& shape, const Search& search,
                   const SequenceView& view);

/** Null: it is not there. */
using PartBlock = std::shared_ptr<Block>;
inline char* data_of(const PartBlock& block) { return block ? block->as<char>() : nullptr; }

struct Parts {
  std::array<PartBlock, kPartCount> blocks;

  PartBlock& operator[](Part part) { return blocks[size_t(part)]; }
  const PartBlock& operator[](Part part) const { return blocks[size_t(part)]; }

  /** The block of a part, here or else in `older`. */
  const PartBlock& newer(Part part, const Parts& older) const {
    return (*this)[part] ? (*this)[part] : older[part];
  }
  /** Gives up its own blocks for the ones in `next`. */
  void take(Parts& next) noexcept {
    for (Part part : kAllParts) {
      if (next[part]) (*this)[part] = std::move(next[part]);
    }
  }
};

}  // namespace pariskv
