// Scores of pages from their digests.
#include <cmath>

#include "cpu/numerics.h"
#include "cpu/plain/plain.h"

namespace pariskv::cpu::plain {

void score_pages(const ScorePagesRun& run) {
  for (int64_t p = 0; p < run.count; ++p) {
    const uint16_t* middle = run.digests + p * 2 * run.dim;
    const uint16_t* distance = middle + run.dim;
    float score = 0;
    for (int64_t q = 0; q < run.queries; ++q) {
      const float* query = run.query + q * run.dim;
      Lanes lanes;
      for (int64_t d = 0; d < run.dim; ++d) {
        float& lane = lanes.value[d % 16];
        lane = std::fma(query[d], float16_to_float(middle[d]), lane);
        lane = std::fma(std::fabs(query[d]), float16_to_float(distance[d]), lane);
      }
      float own = lanes.fold() * run.units[p];
      own = own > -kMostPageScore ? own : -kMostPageScore;
      own = own < kMostPageScore ? own : kMostPageScore;
      score = score + own;
    }
    run.scores[p] = score;
  }
}

}  // namespace pariskv::cpu::plain
