/** Sequences of a host as llama.cpp keeps them, for tests of the plugin. */
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "small_host.h"

namespace pariskv::ggml {

/** Outputs are right, and the plugin was given attention only with a write before it. */
inline void expect_right(const StepResult& result) {
  EXPECT_LT(result.worst, 2e-5);
  if (result.ours > 0) {
    EXPECT_EQ(result.writes, 1);
  }
}

/** A stream of a host as llama.cpp runs it: sequences, free cells, masks. */
class Sequences {
 public:
  Sequences(const Shape& shape, int64_t stream) : shape_(shape), stream_(stream) {}

  /** The token is not in the cache yet: the step writes it. */
  Token append(int64_t id) {
    const std::vector<int64_t> free = free_cells();
    cells_[id].push_back(free.front());
    Token token{stream_, free.front(), std::vector<bool>(size_t(shape_.cells))};
    for (const int64_t cell : cells_[id]) token.sees[size_t(cell)] = true;
    return token;
  }
  /** A state of so many tokens, loaded into free cells. */
  void load(SmallHost& host, int64_t id, int64_t tokens, std::mt19937* random = nullptr) {
    std::vector<int64_t> free = free_cells();
    if (random != nullptr) std::shuffle(free.begin(), free.end(), *random);
    free.resize(size_t(tokens));
    host.load_cells(stream_, free);
    cells_[id].insert(cells_[id].end(), free.begin(), free.end());
  }
  void load_again(SmallHost& host, int64_t id) { host.load_cells(stream_, cells_[id]); }
  std::vector<int64_t>& operator[](int64_t id) { return cells_[id]; }
  void erase(int64_t id) { cells_.erase(id); }
  int64_t free() const { return int64_t(free_cells().size()); }
  /** Cells that a step looks at, as llama.cpp pads them. */
  int64_t visible() const {
    int64_t end = 1;
    for (const auto& [id, cells] : cells_) {
      for (const int64_t cell : cells) end = std::max(end, cell + 1);
    }
    return std::min((end + 63) / 64 * 64, shape_.cells);
  }

 private:
  std::vector<int64_t> free_cells() const {
    std::set<int64_t> used;
    for (const auto& [id, cells] : cells_) used.insert(cells.begin(), cells.end());
    std::vector<int64_t> free;
    for (int64_t cell = 0; cell < shape_.cells; ++cell) {
      if (used.count(cell) == 0) free.push_back(cell);
    }
    return free;
  }

  Shape shape_;
  int64_t stream_;
  std::map<int64_t, std::vector<int64_t>> cells_;
};

}  // namespace pariskv::ggml
