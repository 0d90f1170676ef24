/** The kernels of a decode for one dtype and width, and the sizes of their shared memory. */
#pragma once

#include "launch.h"
#include "pariskv/decode/params.h"

namespace pariskv::cuda {

/** Query heads of a kv head, at most, where the dimensions of rows are known; or any of both. */
enum DenseKind : int { kFourHeads, kEightHeads, kSixteenHeads, kAnyHeads, kDenseKinds };

struct DecodeKernels {
  Kernel<WindowParams> window_logits;
  Kernel<ScoreParams> score[2];       // of whole keys, and of keys told from means of blocks
  Kernel<VotesParams> prepare_votes;  // null: too many dimensions
  Kernel<VotesParams> score_votes;
  Kernel<DenseParams>
      attend_dense[kDenseKinds];              // DenseKind; null: rows are not for the tensor cores
  Kernel<ResidentParams> attend_resident[2];  // for few parts per block, and for many
  Kernel<ResidentParams> attend_tail;
  Kernel<RerankParams> rerank;
  Kernel<AttendParams> attend;

  int score_bytes[2];
  int dense_space, dense_dim;    // besides the stages; of kinds for which it is known
  int votes_bytes, table_bytes;  // votes: with no table, and of one
  int resident_threads, resident_bytes, tail_bytes, rerank_bytes;
  bool resident_row;               // resident_bytes go without the room of a row
  int attend_space, attend_least;  // fixed, and the least room after it
  bool attend_beside;              // attend fits beside one block that reranks
};

/** By rotated dimensions. */
template <typename Element>
DecodeKernels decode_kernels(int64_t rotated_dim);

/** Those that read rows of the zone, where these are narrow, in place of the others. */
template <typename Element>
void set_narrow_kernels(int64_t rotated_dim, DecodeKernels& kernels);

}  // namespace pariskv::cuda
