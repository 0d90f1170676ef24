// Windows of queries, told position by position.
#include "query_windows.h"

#include <gtest/gtest.h>

#include <vector>

namespace pariskv {
namespace {

TEST(QueryWindows, NamesAndCountsThePositionsOfItsWindows) {
  for (const QueryWindows windows : {QueryWindows{240, 16, 256, 4}, QueryWindows{0, 3, 3, 5},
                                     QueryWindows{7, 1, 4, 2}, QueryWindows{5, 8, 8, 1}}) {
    std::vector<int64_t> positions;
    for (int64_t w = 0; w < windows.count; ++w) {
      for (int64_t i = 0; i < windows.size; ++i) {
        positions.push_back(windows.first + w * windows.step + i);
      }
    }
    ASSERT_EQ(windows.positions(), int64_t(positions.size()));
    for (size_t i = 0; i < positions.size(); ++i) {
      EXPECT_EQ(windows.at(int64_t(i)), positions[i]);
    }
    for (int64_t position = 0; position < 1300; ++position) {
      int64_t before = 0;
      for (const int64_t wanted : positions) before += wanted < position;
      ASSERT_EQ(windows.before(position), before) << position;
    }
  }
}

TEST(QueryWindows, AreNoneByThemselves) {
  const QueryWindows none;
  EXPECT_EQ(none.positions(), 0);
  for (const int64_t position : {0, 1, 1000}) EXPECT_EQ(none.before(position), 0);
}

}  // namespace
}  // namespace pariskv
