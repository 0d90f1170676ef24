// The ledger against a host that does to its cells what it likes: after each plan, the sequences
// that a mirror would hold are the cells that the tokens see, with the numbers that are there now.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "../src/ledger.h"

namespace pariskv::ggml {
namespace {

/** A KV cache as llama.cpp keeps one: cells that belong to several sequences, and are used again.
 */
class FakeHost {
 public:
  FakeHost(int64_t cells, uint32_t seed, int64_t least_shared)
      : random_(seed), numbers_(size_t(cells)), ledger_(cells, least_shared) {}

  void act() {
    switch (below(12)) {
      case 0:
        return cut_end();
      case 1:
        return void(sequences_.erase(any()));
      case 2:  // seq_cp
        if (sequences_.size() < 6) sequences_[fresh_++] = sequences_[any()];
        return;
      case 3:
        return cut_middle();
      case 4:
        return load_state();
      case 5:
        return add_prompt();
      case 6:
        if (below(4) == 0) shift_positions();
        return;
      default:
        return step();
    }
  }

  int64_t served() const { return served_; }
  int64_t forks() const { return forks_; }

 private:
  struct Entry {
    int32_t cell;
    uint64_t number;
    bool operator==(const Entry& other) const {
      return cell == other.cell && number == other.number;
    }
  };

  int64_t below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random_);
  }
  int64_t any() {
    if (sequences_.empty()) sequences_[fresh_++];
    auto found = sequences_.begin();
    std::advance(found, below(int64_t(sequences_.size())));
    return found->first;
  }
  std::vector<int32_t> free_cells() {
    std::vector<bool> used(numbers_.size());
    for (const auto& [id, cells] : sequences_) {
      for (const int32_t cell : cells) used[size_t(cell)] = true;
    }
    std::vector<int32_t> free;
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i]) free.push_back(int32_t(i));
    }
    if (below(2) == 0) std::shuffle(free.begin(), free.end(), random_);
    return free;
  }
  void write(int32_t cell) {
    numbers_[size_t(cell)] = ++written_;
    ledger_.write(cell);
  }

  void cut_end() {
    std::vector<int32_t>& cells = sequences_[any()];
    cells.resize(cells.size() - size_t(below(int64_t(cells.size()) / (1 + below(8)) + 1)));
  }
  void cut_middle() {
    std::vector<int32_t>& cells = sequences_[any()];
    if (cells.size() < 8) return;
    const int64_t begin = below(int64_t(cells.size()) - 4), count = 1 + below(4);
    cells.erase(cells.begin() + begin, cells.begin() + begin + count);
  }
  void add_prompt() {
    std::vector<int32_t>& cells = sequences_[any()];
    const std::vector<int32_t> free = free_cells();
    const int64_t count = below(int64_t(free.size()) / 2 + 1);
    ledger_.begin_pass();
    for (int64_t i = 0; i < count; ++i) write(free[size_t(i)]), cells.push_back(free[size_t(i)]);
  }
  void load_state() {  // into cells of a sequence that was there, which no node of a graph shows
    std::vector<int32_t>& cells = sequences_[any()];
    ledger_.begin_pass();
    if (below(2) == 0) std::shuffle(cells.begin(), cells.end(), random_);
    for (const int32_t cell : cells) write(cell);
  }
  void shift_positions() {
    for (uint64_t& number : numbers_) number = ++written_;
    ledger_.forget();
    slots_.clear();
  }

  void step() {
    std::vector<Bits> visible;
    std::vector<std::set<int32_t>> sees;
    std::vector<int32_t> free = free_cells(), written;
    std::set<int64_t> named;
    ledger_.begin_pass();
    for (int64_t rows = 1 + below(4); rows > 0 && !free.empty(); --rows) {
      const int64_t id = any();
      if (below(4) != 0 && !named.insert(id).second) continue;  // else a draft: a token more
      std::vector<int32_t>& cells = sequences_[id];
      write(free.back());
      cells.push_back(free.back()), written.push_back(free.back());
      free.pop_back();
      Bits bits(ledger_.cells());
      for (const int32_t cell : cells) bits.add(cell);
      visible.push_back(bits);
      sees.emplace_back(cells.begin(), cells.end());
    }
    if (visible.empty()) return;
    const Plan plan = ledger_.plan(visible);
    change(plan);
    if (!plan.serves) return;
    ASSERT_EQ(plan.rows.size(), visible.size());
    for (size_t i = 0; i < plan.rows.size(); ++i) check(plan.rows[i], sees[i]);
    for (const int32_t cell : written) ledger_.write(cell);  // the next layer, which is no news
    ++served_;
  }

  void change(const Plan& plan) {
    for (const Change& own : plan.changes) {
      if (own.kind == Change::Kind::kAdd) slots_[own.slot].clear();
      if (own.kind == Change::Kind::kFork) slots_[own.slot] = slots_.at(own.source), ++forks_;
      if (own.kind == Change::Kind::kRemove) slots_.erase(own.slot);
      if (own.kind == Change::Kind::kTruncate) {
        std::vector<Entry>& entries = slots_.at(own.slot);
        ASSERT_LE(own.keep, int64_t(entries.size())) << "cut to more than is there";
        entries.resize(size_t(own.keep));
      }
    }
  }
  void check(const Seen& seen, const std::set<int32_t>& sees) {
    std::vector<Entry>& entries = slots_.at(seen.slot);
    const std::vector<int32_t>& cells = ledger_.cells_of(seen.slot);
    ASSERT_LE(int64_t(entries.size()), seen.tokens);
    ASSERT_LE(seen.tokens, int64_t(cells.size()));
    while (int64_t(entries.size()) < seen.tokens) {
      const int32_t cell = cells[entries.size()];
      entries.push_back({cell, numbers_[size_t(cell)]});
    }
    std::set<int32_t> has;
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_EQ(entries[i].cell, cells[i]);
      ASSERT_EQ(entries[i].number, numbers_[size_t(entries[i].cell)]) << "old numbers";
      has.insert(entries[i].cell);
    }
    ASSERT_EQ(has.size(), entries.size()) << "a cell twice";
    ASSERT_EQ(has, sees);
  }

  std::mt19937 random_;
  std::vector<uint64_t> numbers_;  // that cells hold
  uint64_t written_ = 0;
  std::map<int64_t, std::vector<int32_t>> sequences_;
  int64_t fresh_ = 0, served_ = 0, forks_ = 0;
  Ledger ledger_;
  std::map<int64_t, std::vector<Entry>> slots_;  // what a mirror would hold
};

TEST(Ledger, FollowsAnyHost) {
  const char* given = std::getenv("PARISKV_SCHEDULES");
  const uint32_t schedules = given == nullptr ? 2000 : uint32_t(std::atoi(given));
  int64_t served = 0, forks = 0;
  for (uint32_t seed = 0; seed < schedules; ++seed) {
    SCOPED_TRACE(seed);
    FakeHost host(40 + 37 * (seed % 5), seed, seed % 3 == 0 ? 256 : 4);
    for (int i = 0; i < 60 && !testing::Test::HasFailure(); ++i) host.act();
    if (testing::Test::HasFailure()) return;
    served += host.served(), forks += host.forks();
  }
  EXPECT_GT(served, 10 * int64_t(schedules));
  EXPECT_GT(forks, int64_t(schedules) / 2);
}

/** Steps of one sequence after another, each token in the cell that is named. */
Plan step(Ledger& ledger, Bits& visible, int64_t cell) {
  ledger.begin_pass();
  ledger.write(cell);
  visible.add(cell);
  return ledger.plan({visible});
}

TEST(Ledger, OneSequenceStaysOne) {
  Ledger ledger(1000);
  Bits visible(1000);
  for (int64_t i = 0; i < 400; ++i) visible.add(i);
  for (int64_t i = 400; i < 600; ++i) {
    const Plan plan = step(ledger, visible, i);
    ASSERT_EQ(plan.changes.size(), i == 400 ? 1u : 0u);
    ASSERT_EQ(plan.rows[0].tokens, i + 1);
  }
}

TEST(Ledger, ARingIsLeftToTheHost) {
  Ledger ledger(600);
  Bits visible(600);
  for (int64_t i = 0; i < 500; ++i) visible.add(i);
  int64_t served = 0, read = 0;
  for (int64_t i = 500; i < 1500; ++i) {
    visible.remove((i - 500) % 600);  // the oldest
    const Plan plan = step(ledger, visible, i % 600);
    served += plan.serves;
    for (const Change& change : plan.changes) read += change.kind == Change::Kind::kAdd;
  }
  EXPECT_LT(served, 100);
  EXPECT_LE(read, served);
}

/** A window that slides over a cache of full size, from `first` on. @return steps served, read */
std::pair<int64_t, int64_t> slide(Ledger& ledger, int64_t window, int64_t first, int64_t steps) {
  int64_t served = 0, read = 0;
  Bits visible(ledger.cells());
  for (int64_t i = first - window; i < first; ++i) visible.add(i);
  for (int64_t i = first; i < first + steps; ++i) {
    visible.remove(i - window);
    const Plan plan = step(ledger, visible, i);
    served += plan.serves;
    for (const Change& change : plan.changes) read += change.kind != Change::Kind::kRemove;
  }
  return {served, read};
}

TEST(Ledger, AWindowOverAWholeCacheIsLeftToTheHost) {
  for (const int64_t window : {300, 1024, 4096}) {
    Ledger ledger(16384);
    const auto [served, read] = slide(ledger, window, window, 2000);
    EXPECT_GT(served, 0) << window;
    EXPECT_LT(served, 20) << window;
    EXPECT_LT(read, 2 * served + 2) << window;
  }
}

TEST(Ledger, ARestIsBoundedAndIsShortAgainAfterService) {
  Ledger ledger(40000);
  slide(ledger, 1000, 1000, 20000);  // many rests, each longer than the one before
  const auto steps_until_served = [&](Bits& visible, int64_t first) {
    for (int64_t i = first; i < first + 6000; ++i) {
      if (step(ledger, visible, i).serves) return i - first;
    }
    return int64_t{6000};
  };
  Bits visible(40000);
  for (int64_t i = 20000; i < 21000; ++i) visible.add(i);
  const int64_t waited = steps_until_served(visible, 21000);
  EXPECT_LE(waited, 4096);
  for (int64_t i = 27000; i < 27100; ++i) ASSERT_TRUE(step(ledger, visible, i).serves);
  // It slides again: the next rest is a first one.
  slide(ledger, 1000, 28200, 5);
  ASSERT_TRUE(ledger.rests());
  EXPECT_LE(steps_until_served(visible, 29000), 64);
}

TEST(Ledger, ManyPromptsWithShortAnswersAreNoRest) {
  Ledger ledger(8192);
  for (int prompt = 0; prompt < 200; ++prompt) {
    Bits visible(8192);
    ledger.begin_pass();
    for (int64_t i = 0; i < 7000; ++i) ledger.write(i), visible.add(i);
    for (int64_t i = 7000; i < 7002; ++i) ASSERT_TRUE(step(ledger, visible, i).serves);
  }
}

TEST(Ledger, OverwrittenTokensAreDropped) {
  Ledger ledger(4096);
  std::map<int64_t, int64_t> tokens;  // by slot
  for (int prompt = 0; prompt < 24; ++prompt) {
    Bits visible(4096);
    ledger.begin_pass();
    for (int64_t i = 0; i < 256; ++i) {  // the beginning that all have in common
      if (prompt == 0) ledger.write(i);
      visible.add(i);
    }
    const int64_t end = 3000 + 40 * (prompt % 7);
    for (int64_t i = 256; i < end; ++i) ledger.write(i), visible.add(i);
    for (int64_t i = end; i < end + 4; ++i) {
      const Plan plan = step(ledger, visible, i);
      for (const Change& change : plan.changes) {
        if (change.kind == Change::Kind::kRemove) tokens.erase(change.slot);
        if (change.kind == Change::Kind::kTruncate) tokens[change.slot] = change.keep;
        EXPECT_NE(change.kind, Change::Kind::kFork);
      }
      tokens[plan.rows[0].slot] = plan.rows[0].tokens;
    }
    int64_t all = 0;
    for (const auto& [slot, count] : tokens) all += count;
    ASSERT_EQ(all, end + 4) << "prompt " << prompt;
  }
}

TEST(Ledger, RefusedDraftsAreCutInPlace) {
  Ledger ledger(1000);
  Bits visible(1000);
  for (int64_t i = 0; i < 400; ++i) visible.add(i);
  for (int64_t round = 0; round < 20; ++round) {
    const int64_t first = 400 + round;
    ledger.begin_pass();
    std::vector<Bits> rows;
    Bits sees = visible;
    for (int64_t i = first; i < first + 3; ++i) ledger.write(i), sees.add(i), rows.push_back(sees);
    const Plan plan = ledger.plan(rows);
    ASSERT_EQ(plan.changes.size(), 1u);
    ASSERT_EQ(plan.changes[0].kind, round == 0 ? Change::Kind::kAdd : Change::Kind::kTruncate);
    visible.add(first);  // the other two are refused
  }
}

TEST(Ledger, ADraftsTokensAreOneSequence) {
  Ledger ledger(1000);
  Bits first(1000);
  for (int64_t i = 0; i < 300; ++i) first.add(i);
  ledger.begin_pass();
  Bits second = first;
  for (const int64_t cell : {500, 501}) ledger.write(cell);
  first.add(500), second.add(500), second.add(501);
  const Plan plan = ledger.plan({first, second});
  ASSERT_EQ(plan.rows.size(), 2u);
  EXPECT_EQ(plan.rows[0].slot, plan.rows[1].slot);
  EXPECT_EQ(plan.rows[0].tokens, 301);
  EXPECT_EQ(plan.rows[1].tokens, 302);
}

TEST(Ledger, OrderIsThatOfArrival) {
  Ledger ledger(8, 1);
  Bits visible(8);
  for (const int64_t cell : {5, 2, 7, 0}) {
    ledger.begin_pass();
    ledger.write(cell);
    visible.add(cell);
  }
  const Plan plan = ledger.plan({visible});
  EXPECT_EQ(ledger.cells_of(plan.rows[0].slot), (std::vector<int32_t>{5, 2, 7, 0}));
}

}  // namespace
}  // namespace pariskv::ggml
