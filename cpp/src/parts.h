/**
 * How parts live: one row of a table each, which one walk follows when it plans, forks, counts or
 * gives back. A part of an own kind is a row here, its size in part_size, and a mark in layer.h of
 * what it has.
 */
#pragma once

#include <array>
#include <memory>

#include "memory/arena.h"
#include "ops.h"
#include "part.h"

namespace pariskv {

class Search;

/** What a fork gets. */
enum class OnFork : uint8_t { kShares, kCopies, kLacks };

/** Where a part that is there changes. */
enum class OnWrite : uint8_t {
  kInPlace,
  kBeside,  // in a copy, where what follows may fail; else in place
  kBehind,  // what it has stays: in place if no fork shares it, else in a copy
  kAnew,    // nothing of it stays: in another block
};

struct PartRules {
  const char* name;
  Holds holds;
  OnFork on_fork;
  OnWrite on_write;
};

constexpr PartRules rules_of(Part part) {
  constexpr PartRules kRules[kParts] = {
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

/** Of a layer with such a zone. Whether it is there at all yet, its marks say. */
PartSize part_size(Part part, const ModelShape& shape, const Search& search,
                   const SequenceView& view);

/** Null: it is not there. */
using PartBlock = std::shared_ptr<Block>;
inline char* data_of(const PartBlock& block) { return block ? block->as<char>() : nullptr; }

struct Parts {
  std::array<PartBlock, kParts> blocks;

  PartBlock& operator[](Part part) { return blocks[size_t(part)]; }
  const PartBlock& operator[](Part part) const { return blocks[size_t(part)]; }

  /** The block of a part, of these or else of `others`. */
  const PartBlock& newer(Part part, const Parts& others) const {
    return (*this)[part] ? (*this)[part] : others[part];
  }
  /** Gives up its own blocks for those that are in `next`. */
  void take(Parts& next) noexcept {
    for (Part part : kAllParts) {
      if (next[part]) (*this)[part] = std::move(next[part]);
    }
  }
};

}  // namespace pariskv
