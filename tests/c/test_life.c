/* A cache from its making to its end, and each call on the way. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "model.h"

enum { kOut = kQueryHeads * kDim };

static pariskv_cache* new_cache(void) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  small_config(&config, &policy);
  pariskv_cache* cache = NULL;
  OK(pariskv_cache_create(&config, NULL, &cache));
  return cache;
}

static pariskv_sequence added(pariskv_cache* cache) {
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  return sequence;
}

static int64_t length_of(const pariskv_cache* cache, pariskv_sequence sequence) {
  int64_t tokens = -1;
  OK(pariskv_cache_length(cache, sequence, kLayers - 1, &tokens));
  return tokens;
}

/** Attention of one query over rows, in double. */
static void attend_plainly(const float* q, const float* k, const float* v, int64_t tokens,
                           int64_t head, double* out) {
  double logits[64], sum = 0;
  const int64_t kv = head / (kQueryHeads / kKvHeads);
  for (int64_t t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int64_t d = 0; d < kDim; ++d)
      dot += q[head * kDim + d] * k[(t * kKvHeads + kv) * kDim + d];
    logits[t] = exp(dot / sqrt(kDim));
    sum += logits[t];
  }
  for (int64_t d = 0; d < kDim; ++d) {
    out[d] = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      out[d] += logits[t] / sum * v[(t * kKvHeads + kv) * kDim + d];
    }
  }
}

/** Short sequences are attended to in full: the outputs are those of the formula. */
static void check_attention(pariskv_cache* cache) {
  enum { kTokens = 21 };
  float q[kOut], out[kOut], lse[kQueryHeads];
  float k[kTokens * kKvHeads * kDim], v[kTokens * kKvHeads * kDim];
  fill_rows(q, 1, kQueryHeads, 1), fill_rows(k, kTokens, kKvHeads, 2);
  fill_rows(v, kTokens, kKvHeads, 3);
  const pariskv_sequence sequence = added(cache);
  pariskv_batch* batch = NULL;
  OK(pariskv_batch_create(cache, &sequence, 1, &batch));
  const int64_t tokens = kTokens - 1;
  pariskv_tensor keys = rows_of(k, tokens, kKvHeads), values = rows_of(v, tokens, kKvHeads);
  OK(pariskv_cache_prefill(cache, 0, batch, &tokens, &keys, &values, NULL, NULL));
  const pariskv_tensor queries = rows_of(q, 1, kQueryHeads), outputs = rows_of(out, 1, kQueryHeads);
  keys = rows_of(k + tokens * kKvHeads * kDim, 1, kKvHeads);
  values = rows_of(v + tokens * kKvHeads * kDim, 1, kKvHeads);
  const int64_t shape[2] = {1, kQueryHeads};
  pariskv_tensor sums;
  OK(pariskv_tensor_init(&sums, sizeof sums, lse, PARISKV_FLOAT32, 2, shape));
  pariskv_attend_options options = {sizeof options, 0,    0,   NULL, &sums, NULL, 0, 0,
                                    NULL,           NULL, NULL};
  OK(pariskv_cache_decode(cache, 0, batch, &queries, &keys, &values, &outputs, &options, NULL));
  for (int64_t head = 0; head < kQueryHeads; ++head) {
    double expected[kDim];
    attend_plainly(q, k, v, kTokens, head, expected);
    for (int64_t d = 0; d < kDim; ++d) CHECK(fabs(out[head * kDim + d] - expected[d]) < 1e-5);
    CHECK(isfinite(lse[head]));
  }
  /* The same from the stored token: by decode without one, and by attend. */
  float again[kOut];
  const pariskv_tensor others = rows_of(again, 1, kQueryHeads);
  OK(pariskv_cache_decode(cache, 0, batch, &queries, NULL, NULL, &others, NULL, NULL));
  for (int64_t i = 0; i < kOut; ++i) CHECK(fabs(out[i] - again[i]) < 1e-5);
  const int64_t one = 1;
  OK(pariskv_cache_attend(cache, 0, batch, &one, &queries, NULL, NULL, &others, NULL, NULL));
  for (int64_t i = 0; i < kOut; ++i) CHECK(fabs(out[i] - again[i]) < 1e-5);
  /* On a CPU the fast form is the exact one; a program from before has a shorter struct. */
  float fast[kOut];
  const pariskv_tensor fastest = rows_of(fast, 1, kQueryHeads);
  options.precision = PARISKV_PRECISION_FAST;
  OK(pariskv_cache_attend(cache, 0, batch, &one, &queries, NULL, NULL, &fastest, &options, NULL));
  CHECK(memcmp(fast, again, sizeof fast) == 0);
  options.size = 48, options.precision = 77;
  OK(pariskv_cache_attend(cache, 0, batch, &one, &queries, NULL, NULL, &fastest, &options, NULL));
  CHECK(memcmp(fast, again, sizeof fast) == 0);
  OK(pariskv_cache_attend(cache, 0, batch, &one, &queries, &keys, &values, &others, NULL, NULL));
  int64_t length = 0;
  OK(pariskv_cache_length(cache, sequence, 0, &length));
  CHECK(length == kTokens + 1);
  pariskv_batch_destroy(batch);
  OK(pariskv_cache_remove(cache, sequence, NULL));
}

static void check_sequences(pariskv_cache* cache, pariskv_sequence a, pariskv_sequence b) {
  float one[kOut], other[kOut], both[2 * kOut];
  pariskv_sequence fork_a = -1, fork_b = -1, cut = -1;
  OK(pariskv_cache_fork(cache, a, NULL, &fork_a));
  OK(pariskv_cache_fork(cache, b, NULL, &fork_b));
  const pariskv_sequence pair[2] = {a, b};
  pariskv_sequence forks[2] = {fork_a, fork_b};
  pariskv_batch *batch = NULL, *forked = NULL, *shorter = NULL;
  OK(pariskv_batch_create(cache, pair, 2, &batch));
  OK(pariskv_batch_create(cache, forks, 2, &forked));
  /* Results do not depend on the rest of the batch: row 0 is the same alone. */
  OK(decode_token(cache, batch, 2, 7, both));
  OK(decode_one(cache, fork_a, 7, one));
  CHECK(memcmp(one, both, sizeof one) == 0);
  /* A slot without a sequence: zeros, and nothing is stored. */
  const pariskv_sequence slots[2] = {PARISKV_IDLE, fork_a};
  OK(pariskv_batch_create(cache, slots, 2, &shorter));
  const int64_t length = length_of(cache, fork_a);
  memset(both, 1, sizeof both);
  OK(pariskv_cache_fork(cache, fork_a, NULL, &cut));
  OK(decode_token(cache, shorter, 2, 6, both));
  for (int i = 0; i < kOut; ++i) CHECK(both[i] == 0);
  CHECK(length_of(cache, fork_a) == length + 1);
  REFUSED(PARISKV_INVALID_ARGUMENT, "idle slot at 0", pariskv_cache_flush(cache, shorter, NULL));
  pariskv_batch_destroy(shorter);
  OK(pariskv_cache_remove(cache, fork_a, NULL));
  fork_a = cut;
  forks[0] = fork_a;
  pariskv_batch_destroy(forked);
  OK(pariskv_batch_create(cache, forks, 2, &forked));
  /* Beams: both forks become the first one. */
  const int64_t source[2] = {0, 0};
  OK(pariskv_cache_reorder(cache, forked, source, NULL));
  OK(decode_one(cache, fork_a, 8, one));
  OK(decode_one(cache, fork_b, 8, other));
  CHECK(memcmp(one, other, sizeof one) == 0);
  /* A cut sequence goes on as it did before. */
  const int64_t drop[2] = {1, 1}, keep[2] = {300, 300};
  OK(pariskv_cache_truncate(cache, forked, PARISKV_DROP, drop, NULL));
  OK(decode_one(cache, fork_a, 8, other));
  CHECK(memcmp(one, other, sizeof one) == 0);
  OK(pariskv_cache_truncate(cache, forked, PARISKV_KEEP, keep, NULL));
  CHECK(length_of(cache, fork_a) == 300 && length_of(cache, fork_b) == 300);
  OK(pariskv_cache_flush(cache, forked, NULL));
  pariskv_region_counts counts = {sizeof counts, 0, 0, 0, 0, 0};
  OK(pariskv_cache_regions(cache, fork_a, 0, &counts));
  CHECK(counts.sink == 2 && counts.local == 8 && counts.buffer == 0 && counts.retrieval == 290);
  /* A fork of the first tokens goes on as one that was cut to them. */
  pariskv_sequence prefix = -1;
  OK(pariskv_cache_fork_prefix(cache, b, 300, NULL, &prefix));
  OK(pariskv_cache_fork(cache, b, NULL, &cut));
  OK(pariskv_batch_create(cache, &cut, 1, &shorter));
  OK(pariskv_cache_truncate(cache, shorter, PARISKV_KEEP, keep, NULL));
  OK(decode_one(cache, prefix, 9, one));
  OK(decode_one(cache, cut, 9, other));
  CHECK(memcmp(one, other, sizeof one) == 0 && length_of(cache, prefix) == 301);
  OK(pariskv_cache_remove(cache, prefix, NULL));
  OK(pariskv_cache_remove(cache, cut, NULL));
  pariskv_batch_destroy(shorter);
  OK(pariskv_cache_flush_all(cache, NULL));
  pariskv_sequence all[3];
  int64_t count = 0;
  OK(pariskv_cache_sequences(cache, all, 3, &count));
  CHECK(count == 4 && all[0] == a && all[1] == b && all[2] == fork_b);
  OK(pariskv_cache_remove(cache, fork_a, NULL));
  REFUSED(PARISKV_INVALID_ARGUMENT, "removed", decode_token(cache, forked, 2, 9, both));
  OK(pariskv_cache_remove(cache, fork_b, NULL));
  pariskv_batch_destroy(batch), pariskv_batch_destroy(forked);
}

static void check_rows(pariskv_cache* cache) {
  enum { kTokens = 200 };
  const pariskv_sequence sequence = added(cache);
  OK(add_prompt(cache, sequence, kTokens, 5));
  float* rows = malloc(2 * kTokens * kKvHeads * kDim * sizeof *rows);
  float* expected = malloc(kTokens * kKvHeads * kDim * sizeof *rows);
  const pariskv_tensor k = rows_of(rows, 50, kKvHeads);
  const pariskv_tensor v = rows_of(rows + kTokens * kKvHeads * kDim, 50, kKvHeads);
  OK(pariskv_cache_read(cache, 1, sequence, 100, &k, &v, NULL));
  for (int of_v = 0; of_v < 2; ++of_v) {
    fill_rows(expected, kTokens, kKvHeads, 3 * 5 + 1 + (uint64_t)of_v);
    CHECK(memcmp(of_v ? v.data : k.data, expected + 100 * kKvHeads * kDim,
                 50 * kKvHeads * kDim * sizeof *rows) == 0);
  }
  free(rows), free(expected);
  OK(pariskv_cache_remove(cache, sequence, NULL));
}

void test_life(void) {
  CHECK(strcmp(pariskv_version(), PARISKV_VERSION_STRING) == 0);
  CHECK(pariskv_is_built(PARISKV_CPU) == 1 && pariskv_is_available(PARISKV_CPU) == 1);
  CHECK(pariskv_is_built(7) == 0 && pariskv_is_available(-1) == 0);
  CHECK(strlen(pariskv_cpu_level()) >= 4);
  pariskv_cache* cache = new_cache();
  check_attention(cache);
  check_rows(cache);
  const pariskv_sequence a = added(cache), b = added(cache);
  OK(add_prompt(cache, a, 400, 1));
  OK(add_prompt(cache, b, 500, 2));
  check_sequences(cache, a, b);
  pariskv_stats stats = {.size = sizeof stats};
  OK(pariskv_cache_stats(cache, &stats));
  CHECK(stats.size == sizeof stats && stats.sequences == 2 && stats.tokens == 2 * (401 + 501));
  CHECK(stats.memory_live > 0 && stats.row_bytes > 0 && stats.fetched_rows > 0);
  CHECK(isnan(stats.mean_error));
  pariskv_config config = {.size = sizeof config};
  pariskv_bytes token = {sizeof token, 0, 0}, each = {sizeof each, 0, 0};
  OK(pariskv_cache_config(cache, &config));
  OK(pariskv_config_bytes_per_token(&config, 1000, &token));
  OK(pariskv_config_bytes_per_sequence(&config, 1000, 1, &each));
  CHECK(token.device > 0 && each.device > 0 && token.host == 0 && each.host == 0);
  CHECK(stats.memory_live - stats.workspace_bytes <= 902 * token.device + 2 * each.device);
  OK(pariskv_cache_remove(cache, a, NULL));
  OK(pariskv_cache_remove(cache, b, NULL));
  OK(pariskv_cache_reserve(cache, 2000, 2));
  OK(pariskv_cache_stats(cache, &stats));
  CHECK(stats.memory_reserved >= 2000 * 2 * 2 * kKvHeads * kDim * (int64_t)sizeof(float));
  OK(pariskv_cache_trim(cache));
  OK(pariskv_cache_stats(cache, &stats));
  CHECK(stats.memory_reserved == stats.memory_live);
  CHECK(stats.sequences == 0 && stats.tokens == 0 && stats.row_bytes == 0);
  int64_t count = -1;
  OK(pariskv_cache_sequences(cache, NULL, 0, &count));
  CHECK(count == 0);
  pariskv_cache_destroy(cache);
  pariskv_cache_destroy(NULL), pariskv_batch_destroy(NULL);
  pariskv_explanation_destroy(NULL), pariskv_summaries_destroy(NULL);
}

void test_files(void) {
  char path[64];
  snprintf(path, sizeof path, "/tmp/pariskv_c_%ld", (long)getpid());
  pariskv_cache *cache = new_cache(), *other = new_cache();
  const pariskv_sequence sequence = added(cache);
  OK(add_prompt(cache, sequence, 400, 1));
  OK(pariskv_cache_save(cache, sequence, path));
  pariskv_sequence loaded = -1;
  OK(pariskv_cache_load(other, path, NULL, &loaded));
  float one[kOut], two[kOut];
  for (uint64_t i = 0; i < 20; ++i) {
    OK(decode_one(cache, sequence, 40 + i, one));
    OK(decode_one(other, loaded, 40 + i, two));
    CHECK(memcmp(one, two, sizeof one) == 0);
  }
  remove(path);
  REFUSED(PARISKV_FILE_ERROR, path, pariskv_cache_load(other, path, NULL, &loaded));
  CHECK(pariskv_last_errno() != 0);
  pariskv_cache_destroy(cache), pariskv_cache_destroy(other);
}
