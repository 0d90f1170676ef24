// Random walks of a cache that borrows rows beside one that copies the same rows: equal bits.
#include <algorithm>
#include <cstdlib>

#include "borrowed_support.h"

namespace pariskv {
namespace {

using test::Lending;
using test::Twins;

constexpr Lending kLendings[] = {
    {DType::kFloat32, BorrowedType::kFloat32, BorrowedType::kFloat32},
    {DType::kFloat16, BorrowedType::kFloat16, BorrowedType::kFloat16},
    {DType::kBFloat16, BorrowedType::kBFloat16, BorrowedType::kBFloat16},
    {DType::kFloat32, BorrowedType::kFloat16, BorrowedType::kBFloat16},
    {DType::kFloat32, BorrowedType::kQ8_0, BorrowedType::kQ8_0},
    {DType::kFloat32, BorrowedType::kFloat16, BorrowedType::kQ8_0},
};

int64_t any(std::mt19937& random, int64_t below) { return int64_t(random() % uint64_t(below)); }

/** One random call; `long_prompts`: prompts that open zones of blocks. */
void step(Twins& twins, bool long_prompts, std::mt19937& random) {
  const size_t i = size_t(any(random, int64_t(twins.twins().size())));
  const int64_t tokens = int64_t(twins.twins()[i].cells.size());
  const uint32_t seed = uint32_t(random());
  switch (any(random, 10)) {
    case 0:
    case 1: {
      const int64_t most = long_prompts ? 700 : 90;
      return twins.prefill(i, 1 + any(random, most), any(random, 2) == 0, seed, random);
    }
    case 2:
    case 3: {
      for (int64_t steps = 1 + any(random, 20); steps > 0; --steps) {
        std::vector<size_t> which(twins.twins().size());
        for (size_t t = 0; t < which.size(); ++t) which[t] = t;
        std::shuffle(which.begin(), which.end(), random);
        which.resize(1 + size_t(any(random, int64_t(which.size()))));
        twins.decode(which, seed + uint32_t(steps), random);
        if (testing::Test::HasFatalFailure()) return;
      }
      return;
    }
    case 4:
      return twins.attend(i, 1 + any(random, 12), seed, random);
    case 5:
      if (tokens == 0) return;
      return twins.truncate(i, any(random, 3) == 0
                                   ? any(random, tokens + 1)
                                   : tokens - any(random, std::min<int64_t>(tokens, 40)));
    case 6:
      if (twins.twins().size() >= 4) return twins.remove(i);
      return any(random, 4) == 0 ? twins.add() : twins.fork(i);
    case 7:
    case 8: {
      if (tokens == 0) return;
      const int64_t begin = any(random, tokens), most = tokens - begin;
      return twins.move(i, begin,
                        1 + any(random, any(random, 2) == 0 ? most : std::min<int64_t>(most, 5)));
    }
    default:
      return twins.rewrite(random);
  }
}

void walk(const Lending& lending, int64_t block, int64_t steps, int64_t cells, uint32_t seed) {
  std::mt19937 random(seed);
  Twins twins(lending, block, seed % 4 == 1 ? TailRule::kSample : TailRule::kNone, cells);
  twins.prefill(0, block > 0 ? 1100 : 70, true, seed, random);
  for (int64_t i = 0; i < steps; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", step " << i);
    if (twins.cells().left() < cells / 2) {
      while (twins.twins().size() > 1) twins.remove(1);
      twins.truncate(0, 0);
    }
    step(twins, block > 0, random);
    for (size_t t = 0; t < twins.twins().size() && !testing::Test::HasFatalFailure(); ++t) {
      if (i % 4 == 3 || i + 1 == steps) twins.look(t, seed + uint32_t(i));
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  const Stats lent = twins.borrowing().stats(), owned = twins.copying().stats();
  EXPECT_EQ(lent.tokens, owned.tokens);
  EXPECT_EQ(lent.kept_bytes, 0);  // no copies of the tail's rows
  EXPECT_EQ(lent.row_bytes % (64 * 2 * int64_t(sizeof(void*))), 0);
  EXPECT_LT(lent.row_bytes, owned.row_bytes / 8 + 1);
}

class BorrowedWalks : public testing::TestWithParam<Lending> {};

TEST_P(BorrowedWalks, WholeKeysGiveTheBitsOfCopies) {
  const char* asked = std::getenv("PARISKV_SCHEDULES");
  const uint32_t schedules = asked == nullptr ? 12 : uint32_t(std::atoi(asked));
  for (uint32_t seed = 0; seed < schedules; ++seed) {
    walk(GetParam(), 0, 24, 4000, seed);
    if (HasFatalFailure()) return;
  }
}

TEST_P(BorrowedWalks, BlocksOfKeysGiveTheBitsOfCopies) {
  const char* asked = std::getenv("PARISKV_SCHEDULES");
  const uint32_t schedules = asked == nullptr ? 2 : uint32_t(std::atoi(asked)) / 20;
  for (uint32_t seed = 0; seed < schedules; ++seed) {
    walk(GetParam(), 64, 24, 16000, seed);
    if (HasFatalFailure()) return;
  }
}

std::string name_of_case(const testing::TestParamInfo<Lending>& info) {
  const char* types[] = {"float32", "float16", "bfloat16", "q8_0"};
  return std::string(types[int(info.param.key)]) + "_" + types[int(info.param.value)] + "_beside_" +
         name_of(info.param.dtype);
}

INSTANTIATE_TEST_SUITE_P(Rows, BorrowedWalks, testing::ValuesIn(kLendings), name_of_case);

}  // namespace
}  // namespace pariskv
