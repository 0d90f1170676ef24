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

TEST(Tuning, AHostsKernelIsLeftForASearchNoSoonerThanTheEnginesOwn) {
  for (const int major : {8, 9}) {
    const Crossings& at = cuda::tuning_for(major, 0).crossings;
    EXPECT_GE(at.own.tokens, ParisKV::kSearchedFromByBatch);
    EXPECT_GE(at.paged.tokens, at.own.tokens);
    EXPECT_GE(at.paged.worth, at.own.worth);
  }
}

}  // namespace
}  // namespace pariskv::test
