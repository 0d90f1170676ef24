#include "model.h"

#include <stdlib.h>

uint64_t next_number(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

float next_float(uint64_t* state) {
  return (float)(next_number(state) >> 40) / (float)(1 << 23) - 1.0f;
}

void small_config(pariskv_config* config, pariskv_policy_pariskv* policy) {
  pariskv_config_init(config, sizeof *config);
  config->layers = kLayers;
  config->query_heads = kQueryHeads;
  config->kv_heads = kKvHeads;
  config->head_dim = kDim;
  config->dtype = PARISKV_FLOAT32;
  config->sink = 2;
  config->local = 8;
  config->update = 16;
  config->dense_below = 64;
  config->segment_tokens = 64;
  config->threads = 1;
  if (policy == NULL) return;
  pariskv_policy_pariskv_init(policy, sizeof *policy);
  policy->top_k = 4;
  policy->block = 0;
  config->pariskv = policy;
}

void fill_rows(float* rows, int64_t tokens, int64_t heads, uint64_t seed) {
  uint64_t state = seed * 1000003u;
  for (int64_t i = 0; i < tokens * heads * kDim; ++i) rows[i] = 2 * next_float(&state);
}

pariskv_tensor rows_of(float* rows, int64_t tokens, int64_t heads) {
  const int64_t shape[3] = {tokens, heads, kDim};
  pariskv_tensor tensor;
  pariskv_tensor_init(&tensor, sizeof tensor, rows, PARISKV_FLOAT32, 3, shape);
  return tensor;
}

static float* new_rows(int64_t tokens, int64_t heads, uint64_t seed) {
  float* rows = malloc((size_t)(tokens * heads * kDim + 1) * sizeof *rows);
  fill_rows(rows, tokens, heads, seed);
  return rows;
}

pariskv_status add_prompt(pariskv_cache* cache, pariskv_sequence sequence, int64_t tokens,
                          uint64_t seed) {
  float* q = new_rows(tokens, kQueryHeads, 3 * seed);
  float* k = new_rows(tokens, kKvHeads, 3 * seed + 1);
  float* v = new_rows(tokens, kKvHeads, 3 * seed + 2);
  const pariskv_tensor queries = rows_of(q, tokens, kQueryHeads);
  const pariskv_tensor keys = rows_of(k, tokens, kKvHeads), values = rows_of(v, tokens, kKvHeads);
  pariskv_prefill_options options = {sizeof options, &queries, 0, 0, NULL, NULL};
  pariskv_batch* batch = NULL;
  pariskv_status status = pariskv_batch_create(cache, &sequence, 1, &batch);
  for (int64_t layer = 0; layer < kLayers && status == PARISKV_OK; ++layer) {
    status = pariskv_cache_prefill(cache, layer, batch, &tokens, &keys, &values, &options, NULL);
  }
  pariskv_batch_destroy(batch);
  free(q), free(k), free(v);
  return status;
}

pariskv_status decode_token(pariskv_cache* cache, const pariskv_batch* batch, int64_t count,
                            uint64_t seed, float* out) {
  float* q = new_rows(count, kQueryHeads, 3 * seed);
  float* k = new_rows(count, kKvHeads, 3 * seed + 1);
  float* v = new_rows(count, kKvHeads, 3 * seed + 2);
  const pariskv_tensor queries = rows_of(q, count, kQueryHeads);
  const pariskv_tensor keys = rows_of(k, count, kKvHeads), values = rows_of(v, count, kKvHeads);
  const pariskv_tensor outputs = rows_of(out, count, kQueryHeads);
  pariskv_status status = PARISKV_OK;
  for (int64_t layer = 0; layer < kLayers && status == PARISKV_OK; ++layer) {
    status =
        pariskv_cache_decode(cache, layer, batch, &queries, &keys, &values, &outputs, NULL, NULL);
  }
  free(q), free(k), free(v);
  return status;
}

pariskv_status decode_one(pariskv_cache* cache, pariskv_sequence sequence, uint64_t seed,
                          float* out) {
  pariskv_batch* batch = NULL;
  pariskv_status status = pariskv_batch_create(cache, &sequence, 1, &batch);
  if (status == PARISKV_OK) status = decode_token(cache, batch, 1, seed, out);
  pariskv_batch_destroy(batch);
  return status;
}
