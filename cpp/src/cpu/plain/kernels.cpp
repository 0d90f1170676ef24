#include "cpu/plain/plain.h"

namespace pariskv::cpu {

const Kernels& plain_kernels() {
  static const Kernels kernels = {
      "plain",
      plain::encode,
      plain::tally,
      plain::score_signs,
      plain::score_votes,
      plain::mean_dots,
      plain::collect,
      plain::round_dots,
      plain::step_logits,
      plain::weigh,
      plain::add_shares,
      plain::estimate,
      plain::score_pages,
      plain::attend,
      plain::sum_exp,
      plain::add_exp,
      plain::to_float,
      plain::to_int8,
      plain::affine,
  };
  return kernels;
}

}  // namespace pariskv::cpu
