/** What a running softmax says when it is asked. Scalar, shared by the verbs. */
#pragma once

#include <cmath>

#include "ops.h"

namespace pariskv::cpu {

/** log of (sum * e^maximum + e^bias); minus infinity when there is neither. */
inline float log_sum_exp(float maximum, float sum, const float* bias) {
  const float seen = sum > 0 || sum != sum ? maximum + std::log(sum) : -INFINITY;
  if (bias == nullptr) return seen;
  const float top = seen > *bias ? seen : *bias;
  if (top == -INFINITY) return top;
  return top + std::log(std::exp(seen - top) + std::exp(*bias - top));
}

/** e^maximum as a share of sum * e^maximum + e^bias; 0 where nothing has been seen. */
inline float share_of_maximum(float maximum, float sum, const float* bias) {
  if (maximum == -INFINITY || sum == 0) return 0;
  if (bias == nullptr) return 1 / sum;
  const float top = maximum > *bias ? maximum : *bias;
  const float seen = std::exp(maximum - top);
  return seen / (sum * seen + std::exp(*bias - top));
}

inline const float* bias_of(const Logits& logits, int64_t query_head) {
  return logits.sink_bias == nullptr ? nullptr : logits.sink_bias + query_head;
}

inline float soft_capped(float logit, float softcap) {
  return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit;
}

}  // namespace pariskv::cpu
