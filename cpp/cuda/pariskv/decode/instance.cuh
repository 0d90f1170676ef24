/** The kernels of one dtype: included where they are compiled. */
#pragma once

#include "dispatch.h"
#include "pariskv/decode/dense/kernel.cuh"
#include "pariskv/decode/kernels.h"
#include "pariskv/decode/rerank/kernel.cuh"
#include "pariskv/decode/row_kernels.cuh"
#include "pariskv/decode/score/kernel.cuh"
#include "pariskv/decode/votes/kernel.cuh"
#include "pariskv/decode/window/kernel.cuh"

namespace pariskv::cuda {

template <typename Element, int kWords>
DecodeKernels kernels_of() {
  DecodeKernels kernels{};
  kernels.window_logits = window_logits_kernel<Element, kWords>;
  kernels.score[0] = score_kernel<Element, kWords, false>;
  kernels.score[1] = score_kernel<Element, kWords, true>;
  if constexpr (32 * kWords <= kMaxVoteDim) {
    kernels.prepare_votes = prepare_votes_kernel<Element, kWords>;
    kernels.score_votes = score_votes_kernel<Element, kWords>;
  }
  if constexpr (kDirect<Element> && kWords <= kMostDenseWords) {
    kernels.attend_dense[kFourHeads] = attend_dense_kernel<Element, kWords, 4, true>;
    kernels.attend_dense[kEightHeads] = attend_dense_kernel<Element, kWords, 8, true>;
    kernels.attend_dense[kSixteenHeads] = attend_dense_kernel<Element, kWords, 16, true>;
    kernels.attend_dense[kAnyHeads] = attend_dense_kernel<Element, kWords, 16, false>;
    kernels.dense_dim = 32 * kWords;
    kernels.dense_space = padded_bytes<DenseSpace<kWords>>;
  }
  kernels.rerank = rerank_kernel<Element, kWords>;
  kernels.score_bytes[0] = Score<Element, kWords, false>::kBytes;
  kernels.score_bytes[1] = Score<Element, kWords, true>::kBytes;
  kernels.votes_bytes = kVotesBytes<kWords>;
  kernels.table_bytes = kTableBytes<kWords>;
  kernels.rerank_bytes = padded_bytes<RerankSpace<kWords>> + kRerankBytes<kWords>;
  kernels.attend_beside = kWords < 8;
  set_row_kernels<Element, kWords>(kernels);
  return kernels;
}

template <typename Element>
DecodeKernels decode_kernels(int64_t rotated_dim) {
  return dispatch(RotatedDims{}, rotated_dim,
                  [](auto dim) { return kernels_of<Element, int(decltype(dim)::kValue / 32)>(); });
}

}  // namespace pariskv::cuda
