/*
 * The smallest program around the engine in C: one sequence, a prompt, some decode steps.
 * With pariskv installed, and PKG_CONFIG_PATH naming its lib/pkgconfig where that is not a usual
 * one: cc examples/c/main.c $(pkg-config --cflags --libs pariskv) -o example
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "pariskv/c.h"

enum { kLayers = 2, kQueryHeads = 8, kKvHeads = 2, kHeadDim = 64, kPrompt = 20000, kSteps = 32 };

static void must(pariskv_status status) {
  if (status == PARISKV_OK) return;
  fprintf(stderr, "%s\n", pariskv_last_error());
  exit(1);
}

static float* random_rows(int64_t tokens, int64_t heads) {
  float* rows = malloc((size_t)(tokens * heads * kHeadDim) * sizeof *rows);
  if (rows == NULL) exit(1);
  for (int64_t i = 0; i < tokens * heads * kHeadDim; ++i) {
    rows[i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
  }
  return rows;
}

static pariskv_tensor tensor_of(float* rows, int64_t tokens, int64_t heads) {
  const int64_t shape[3] = {tokens, heads, kHeadDim};
  pariskv_tensor tensor;
  must(pariskv_tensor_init(&tensor, sizeof tensor, rows, PARISKV_FLOAT32, 3, shape));
  return tensor;
}

int main(void) {
  pariskv_config config;
  must(pariskv_config_init(&config, sizeof config));
  config.layers = kLayers;
  config.query_heads = kQueryHeads;
  config.kv_heads = kKvHeads;
  config.head_dim = kHeadDim;
  config.dtype = PARISKV_FLOAT32;
  pariskv_cache* cache;
  must(pariskv_cache_create(&config, NULL, &cache));

  pariskv_sequence chat;
  pariskv_batch* batch;
  must(pariskv_cache_add(cache, &chat));
  must(pariskv_batch_create(cache, &chat, 1, &batch));

  const int64_t tokens = kPrompt;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    float *k = random_rows(kPrompt, kKvHeads), *v = random_rows(kPrompt, kKvHeads);
    const pariskv_tensor keys = tensor_of(k, kPrompt, kKvHeads);
    const pariskv_tensor values = tensor_of(v, kPrompt, kKvHeads);
    must(pariskv_cache_prefill(cache, layer, batch, &tokens, &keys, &values, NULL, NULL));
    free(k), free(v);
  }

  float* out = random_rows(1, kQueryHeads);
  const pariskv_tensor output = tensor_of(out, 1, kQueryHeads);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      float *q = random_rows(1, kQueryHeads), *k = random_rows(1, kKvHeads);
      float* v = random_rows(1, kKvHeads);
      const pariskv_tensor query = tensor_of(q, 1, kQueryHeads);
      const pariskv_tensor key = tensor_of(k, 1, kKvHeads), value = tensor_of(v, 1, kKvHeads);
      must(pariskv_cache_decode(cache, layer, batch, &query, &key, &value, &output, NULL, NULL));
      free(q), free(k), free(v);
    }
  }

  int64_t length;
  pariskv_stats stats = {.size = sizeof stats};
  must(pariskv_cache_length(cache, chat, 0, &length));
  must(pariskv_cache_stats(cache, &stats));
  printf("pariskv %s on %s, from C: %lld tokens in each of %d layers\n", pariskv_version(),
         pariskv_cpu_level(), (long long)length, kLayers);
  printf("%lld searches fetched %lld rows; %.1f MiB held\n", (long long)stats.searched_tokens,
         (long long)stats.fetched_rows, (double)stats.memory_live / (1 << 20));
  free(out);
  pariskv_batch_destroy(batch);
  pariskv_cache_destroy(cache);
  return 0;
}
