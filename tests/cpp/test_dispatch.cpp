// From sizes and types to code: what has none is refused, never left undone.
#include <gtest/gtest.h>

#include <string>

#include "cpu/simd/kernels.h"
#include "dispatch.h"
#include "pariskv/error.h"

namespace pariskv {
namespace {

TEST(Dispatch, EverySizeOfAListReachesItsOwnCode) {
  for (const int64_t size : {64, 80, 96, 128, 192, 256, 512}) {
    EXPECT_TRUE(contains(HeadDims{}, size));
    EXPECT_EQ(dispatch(HeadDims{}, size, [](auto dim) { return decltype(dim)::kValue; }), size);
  }
  EXPECT_EQ(text_of(HeadDims{}), "64, 80, 96, 128, 192, 256 or 512");
}

TEST(Dispatch, ASizeBesideTheListThrows) {
  for (const int64_t size : {0, -64, 72, 160, 1024}) {
    EXPECT_FALSE(contains(HeadDims{}, size));
    EXPECT_THROW(dispatch(HeadDims{}, size, [](auto) {}), InternalError);
  }
}

TEST(Dispatch, EveryTypeReachesItsOwnCodeAndOthersThrow) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(dispatch(dtype, [](auto type) { return decltype(type)::value; }), dtype);
  }
  EXPECT_THROW(dispatch(DType(9), [](auto) {}), InternalError);
}

class KernelsOfALevel : public testing::TestWithParam<const cpu::Kernels* (*)()> {};

TEST_P(KernelsOfALevel, ThrowForSizesTheyWereNotCompiledFor) {
  const cpu::Kernels* kernels = GetParam()();
  if (kernels == nullptr) GTEST_SKIP() << "not on this machine";
  cpu::EncodeRun encoded{};
  encoded.rotated_dim = 96;
  EXPECT_THROW(kernels->encode(encoded), InternalError);
  cpu::RoundDotsRun dots{};
  dots.head_dim = 72;
  EXPECT_THROW(kernels->round_dots(dots), InternalError);
  dots.head_dim = 64, dots.type = RowType(9);
  EXPECT_THROW(kernels->round_dots(dots), InternalError);
  cpu::EstimateRun estimated{};
  estimated.rotated_dim = 1024;
  EXPECT_THROW(kernels->estimate(estimated), InternalError);
  cpu::ScorePagesRun pages{};
  pages.dim = 72;
  EXPECT_THROW(kernels->score_pages(pages), InternalError);
  cpu::ScoreSignsRun signs{};
  signs.subspaces = 24;
  EXPECT_THROW(kernels->score_signs(signs), InternalError);
  cpu::ScoreVotesRun votes{};
  votes.subspaces = 64;
  EXPECT_THROW(kernels->score_votes(votes), InternalError);
}

INSTANTIATE_TEST_SUITE_P(Levels, KernelsOfALevel,
                         testing::Values(cpu::avx2_kernels, cpu::avx512_kernels));

TEST(Dispatch, ATypeThatPlainKernelsDoNotKnowThrows) {
  float out[1];
  EXPECT_THROW(cpu::plain_kernels().to_float(out, RowType(9), 1, out), InternalError);
}

TEST(Dispatch, ChoosesAKnownTable) {
  const cpu::Kernels& best = cpu::best_kernels();
  EXPECT_TRUE(&best == &cpu::plain_kernels() || &best == cpu::avx2_kernels() ||
              &best == cpu::avx512_kernels());
  EXPECT_EQ(&best, &cpu::best_kernels());
}

}  // namespace
}  // namespace pariskv
