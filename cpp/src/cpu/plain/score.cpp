// The coarse scan: a small integer per key from its sign bytes and its norm.
#include <algorithm>
#include <cmath>

#include "cpu/numerics.h"
#include "cpu/plain/plain.h"
#include "policy/pariskv/codec/head_scale.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cpu::plain {

namespace {

float block_offset(const ScoreSignsRun& run, int64_t head, int64_t block) {
  const float steps = float(run.steps[head * run.step_stride + block]);
  return std::fma(steps, run.per_step[head], run.offset[head]);
}

}  // namespace

void score_signs(const ScoreSignsRun& run) {
  for (int64_t i = 0; i < run.count; ++i) {
    const uint8_t code = run.norm_codes[i];
    if (code == 0) {
      run.scores[i] = 0;
      continue;
    }
    const float norm = float_of(uint32_t(code + kNormBase) << kNormShift);
    const uint8_t* signs = run.signs + i * run.subspaces;
    const auto score_of = [&](int64_t h) {
      if (h >= run.heads) return 0;
      const int8_t* query = run.query + h * run.subspaces * kSubspaceDim;
      int32_t dot = 0;
      for (int64_t d = 0; d < run.subspaces * kSubspaceDim; ++d) {
        dot += (signs[d / 8] >> (d % 8)) & 1 ? query[d] : -query[d];
      }
      // dot has 13 bits and norm 5: products are exact, and so is the choice of bucket.
      const float base = run.block == 0 ? run.offset[h] : block_offset(run, h, i / run.block);
      const float offset = std::fma(norm * norm, run.variance_term[h], base);
      const float score = std::fma(float(dot) * norm, run.slope[h], offset);
      return int(std::min(std::max(0.0f, score), 255.0f));  // of NaN the first; rounds down
    };
    const auto joined = [&](int32_t a, int32_t b) { return joined_score(a, b, run.octave); };
    const auto score_of_four = [&](int64_t h) {
      return joined(joined(score_of(h), score_of(h + 1)), joined(score_of(h + 2), score_of(h + 3)));
    };
    int32_t all = 0;
    for (int64_t h = 0; h < run.heads; h += 8) {
      int32_t eight = score_of_four(h);
      if (h + 4 < run.heads) eight = joined(eight, score_of_four(h + 4));
      eight = std::max(eight, 1);
      all = h == 0 ? eight : joined(all, eight);
    }
    run.scores[i] = uint8_t(all);
  }
}

void score_votes(const ScoreVotesRun& run) {
  for (int64_t i = 0; i < run.count; ++i) {
    if (run.norm_codes[i] == 0) {
      run.scores[i] = 0;
      continue;
    }
    int32_t best = 0;
    for (int64_t h = 0; h < run.heads; ++h) {
      int32_t votes = 0;
      for (int64_t b = 0; b < run.subspaces; ++b) {
        votes += run.votes[(h * run.subspaces + b) * 256 + run.signs[i * run.subspaces + b]];
      }
      best = std::max(best, votes);
    }
    run.scores[i] = uint8_t(1 + best);
  }
}

void mean_dots(const MeanDotsRun& run) {
  for (int64_t b = 0; b < run.count; ++b) {
    for (int64_t h = 0; h < run.heads; ++h) {
      int32_t dot = 0;
      for (int64_t c = 0; c < run.dim; ++c) {
        dot += int32_t{run.means[b * run.dim + c]} * run.query[h * run.dim + c];
      }
      run.dots[h * run.stride + b] = dot;
    }
  }
}

}  // namespace pariskv::cpu::plain
