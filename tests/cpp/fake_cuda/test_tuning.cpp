// Which row of the table of measured numbers a device has.
#include <gtest/gtest.h>

#include "fake.h"
#include "pariskv/policies.h"
#include "tuning.h"

namespace pariskv::test {
namespace {

TEST(Tuning, AnArchitectureWithoutARowHasTheNearestLowerOne) {
  using cuda::tuning_for;
  EXPECT_EQ(&tuning_for(8, 9), &tuning_for(8, 0));
  EXPECT_NE(&tuning_for(9, 0), &tuning_for(8, 9));
  EXPECT_EQ(&tuning_for(12, 1), &tuning_for(9, 0));
  EXPECT_EQ(&tuning_for(7, 5), &tuning_for(8, 0)) << "which none is lower than";
  EXPECT_EQ(&cuda::tuning_of(kDevice), &tuning_for(9, 0));
}

TEST(Tuning, CrossingsAscend) {
  for (const int major : {8, 9}) {
    int64_t heads = 0, tokens = 1 << 20;
    for (const Crossing& crossing : cuda::tuning_for(major, 0).crossings) {
      EXPECT_GT(crossing.heads, heads) << "the first that has as many heads counts";
      EXPECT_LE(crossing.tokens, tokens) << "more heads are worth a search sooner";
      EXPECT_GE(crossing.tokens, ParisKV::kSearchedFromByBatch);
      heads = crossing.heads, tokens = crossing.tokens;
    }
  }
}

}  // namespace
}  // namespace pariskv::test
