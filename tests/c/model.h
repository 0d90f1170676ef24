/** A small model for the tests: its config, rows of it, and steps over them. */
#pragma once

#include <stdint.h>

#include "pariskv/c.h"

enum { kLayers = 2, kQueryHeads = 4, kKvHeads = 2, kDim = 64, kMostTokens = 1300 };

/** Numbers that look random and are the same everywhere. */
uint64_t next_number(uint64_t* state);
float next_float(uint64_t* state);

/** Zones that begin with 64 tokens, and move every 16. */
void small_config(pariskv_config* config, pariskv_policy_pariskv* policy);

/** Rows (tokens, heads, kDim) of a seed, and a tensor on them. */
void fill_rows(float* rows, int64_t tokens, int64_t heads, uint64_t seed);
pariskv_tensor rows_of(float* rows, int64_t tokens, int64_t heads);

/** Appends tokens of a seed to every layer of one sequence, with queries. */
pariskv_status add_prompt(pariskv_cache* cache, pariskv_sequence sequence, int64_t tokens,
                          uint64_t seed);

/** Decodes a token of a seed for each sequence, in every layer. `out`: of the last layer. */
pariskv_status decode_token(pariskv_cache* cache, const pariskv_batch* batch, int64_t count,
                            uint64_t seed, float* out);

/** The same for a single sequence, by a batch of its own. */
pariskv_status decode_one(pariskv_cache* cache, pariskv_sequence sequence, uint64_t seed,
                          float* out);
