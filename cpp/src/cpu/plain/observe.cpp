// Whole-number attention: logits, weights and shares, by observe.h and octaves.h.
#include "observe.h"

#include <algorithm>

#include "cpu/plain/plain.h"
#include "octaves.h"

namespace pariskv::cpu::plain {

static_assert(kShareShift == 63 - kShareBits);

void step_logits(const StepLogitsRun& run) {
  for (int64_t r = 0; r < run.count; ++r) {
    const float product = float(run.dots[r]) * finite_unit(run.unit * run.steps[r]);
    const int32_t own = run.offset + whole_steps(product);
    run.logits[r] = std::max(run.logits[r], std::clamp(own, -run.most, run.most));
  }
}

uint64_t weigh(int32_t* logits, int64_t count, int32_t most, const uint32_t*) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < count; ++r) {
    const uint32_t weight = weight_of(most - logits[r]);
    logits[r] = int32_t(weight);
    sum += weight;
  }
  return sum;
}

void add_shares(const int32_t* weights, int64_t count, uint64_t reciprocal, uint64_t* shares) {
  for (int64_t r = 0; r < count; ++r) shares[r] += share_of(uint32_t(weights[r]), reciprocal);
}

}  // namespace pariskv::cpu::plain
