/**
 * The plain kernels, one file per verb; together they are plain_kernels().
 */
#pragma once

#include "cpu/simd/kernels.h"

namespace pariskv::cpu::plain {

void encode(const EncodeRun& run);
void tally(const uint8_t* signs, const int32_t* units, int64_t count, int64_t subspaces,
           int32_t* positive);
void score_signs(const ScoreSignsRun& run);
void score_votes(const ScoreVotesRun& run);
void mean_dots(const MeanDotsRun& run);
int64_t collect(const uint8_t* scores, int64_t count, uint8_t threshold, int64_t* ties,
                int32_t base, int32_t* out);
void round_dots(const RoundDotsRun& run);
void step_logits(const StepLogitsRun& run);
uint64_t weigh(int32_t* logits, int64_t count, int32_t most, const uint32_t* table);
void add_shares(const int32_t* weights, int64_t count, uint64_t reciprocal, uint64_t* shares);
void estimate(const EstimateRun& run);
void score_pages(const ScorePagesRun& run);
void attend(const AttendRun& run);
float sum_exp(const float* x, int64_t count, float shift);
void add_exp(const float* x, int64_t count, float shift, float* sums);
void to_float(const void* half, RowType type, int64_t count, float* out);
void to_int8(const void* half, RowType type, int64_t count, char* out);
uint32_t affine(const float* x, const float* factor, const float* added, int64_t count, float* out);

/**
 * The Walsh-Hadamard transform in place, unscaled, `count` a power of two. Butterflies in
 * the order h = 1, 2, 4, ...: every output is one fixed tree of additions.
 */
void walsh_hadamard(float* x, int64_t count);

}  // namespace pariskv::cpu::plain
