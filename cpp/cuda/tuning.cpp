// The table alone, which needs no CUDA: a number that is tried compiles this file anew.
#include "tuning.h"

namespace pariskv::cuda {

namespace {

/** Of an H100 and an H200 with rows of 128 dimensions: bench/notes/tried.md has the figures. */
constexpr Tuning kHopper = [] {
  Tuning row{};
  row.crossings = {{5632, 131072}, {9216, 327680}};
  row.scores_per_sm = 2;
  row.means_per_sm = 3;
  row.reranks_per_sm = 2;
  row.warmup_blocks = 8;  // 4 % of a step at 1 x 512K
  row.attend_bytes = 92 << 10;
  row.blocks_in_turns = 8;
  row.branch_heads = 8, row.decode_branches = 2;
  row.branch_jobs = 4, row.encode_branches = 4;
  row.kept_per_sm = 4;
  row.pages_per_sm = 2;
  row.listed_copy_blocks = 32;
  row.rows_per_sm = 16;
  return row;
}();

/** Of 8.x: not measured, the numbers of 9.0. */
constexpr Tuning kAmpere = kHopper;

struct Row {
  int major, minor;  // the compute capability that it begins with
  const Tuning& tuning;
};

/** Ascending. */
constexpr Row kRows[] = {{8, 0, kAmpere}, {9, 0, kHopper}};

}  // namespace

const Tuning& tuning_for(int major, int minor) {
  const Row* found = kRows;
  for (const Row& row : kRows) {
    if (10 * row.major + row.minor <= 10 * major + minor) found = &row;
  }
  return found->tuning;
}

}  // namespace pariskv::cuda
