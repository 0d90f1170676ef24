/* Rows that the program keeps: every call on them, beside a cache that copies the same rows. */
#include <stdlib.h>

#include "check.h"
#include "model.h"

enum { kTokens = 300, kRow = kKvHeads * kDim, kOut = kQueryHeads * kDim };

/** Rows of every layer have the same numbers. */
typedef struct {
  float* keys;
  float* values;
  const void* key_at[kTokens];
  const void* value_at[kTokens];
} Program;

static Program new_program(uint64_t seed) {
  Program own = {
      calloc(kTokens, kRow * sizeof(float)), calloc(kTokens, kRow * sizeof(float)), {NULL}, {NULL}};
  fill_rows(own.keys, kTokens, kKvHeads, seed), fill_rows(own.values, kTokens, kKvHeads, seed + 1);
  for (int i = 0; i < kTokens; ++i) {
    own.key_at[i] = own.keys + (int64_t)i * kRow, own.value_at[i] = own.values + (int64_t)i * kRow;
  }
  return own;
}

static void end_program(Program* own) { free(own->keys), free(own->values); }

static pariskv_cache* new_cache(int borrows) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  pariskv_borrowed_rows rows;
  small_config(&config, &policy);
  OK(pariskv_borrowed_rows_init(&rows, sizeof rows));
  CHECK(rows.key == PARISKV_BORROWED_FLOAT16 && rows.key_head_stride == 0);
  rows.key = rows.value = PARISKV_BORROWED_FLOAT32;
  config.borrowed = borrows ? &rows : NULL;
  pariskv_cache* cache = NULL;
  OK(pariskv_cache_create(&config, NULL, &cache));
  pariskv_config told = {.size = sizeof told};
  OK(pariskv_cache_config(cache, &told));
  CHECK((told.borrowed != NULL) == borrows);
  if (borrows) CHECK(told.borrowed->key_head_stride == kDim * (int64_t)sizeof(float));
  return cache;
}

/** Both caches, a sequence in each, and outputs that have to be equal. */
typedef struct {
  Program own;
  pariskv_cache *borrowing, *copying;
  pariskv_sequence lent, copied;
  pariskv_batch *lent_batch, *copied_batch;
  float q[8 * kOut], out[8 * kOut], other[8 * kOut];
} Twins;

static void check_equal(const Twins* twins, int64_t tokens) {
  const size_t bytes = (size_t)(tokens * kOut) * sizeof(float);
  CHECK(memcmp(twins->out, twins->other, bytes) == 0);
}

/** Decodes token number `at` of the program in both, in every layer. */
static void decode_both(Twins* twins, int64_t at) {
  fill_rows(twins->q, 1, kQueryHeads, 77 + (uint64_t)at);
  const pariskv_tensor q = rows_of(twins->q, 1, kQueryHeads);
  const pariskv_tensor out = rows_of(twins->out, 1, kQueryHeads);
  const pariskv_tensor other = rows_of(twins->other, 1, kQueryHeads);
  const pariskv_tensor k = rows_of(twins->own.keys + at * kRow, 1, kKvHeads);
  const pariskv_tensor v = rows_of(twins->own.values + at * kRow, 1, kKvHeads);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    OK(pariskv_cache_decode_rows(twins->borrowing, layer, twins->lent_batch, &q,
                                 twins->own.key_at + at, twins->own.value_at + at, &out, NULL,
                                 NULL));
    OK(pariskv_cache_decode(twins->copying, layer, twins->copied_batch, &q, &k, &v, &other, NULL,
                            NULL));
    check_equal(twins, 1);
  }
}

static void prefill_both(Twins* twins, int64_t tokens) {
  const pariskv_tensor k = rows_of(twins->own.keys, tokens, kKvHeads);
  const pariskv_tensor v = rows_of(twins->own.values, tokens, kKvHeads);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    OK(pariskv_cache_prefill_rows(twins->borrowing, layer, twins->lent_batch, &tokens,
                                  twins->own.key_at, twins->own.value_at, NULL, NULL));
    OK(pariskv_cache_prefill(twins->copying, layer, twins->copied_batch, &tokens, &k, &v, NULL,
                             NULL));
  }
}

static void attend_both(Twins* twins, int64_t at, int64_t tokens) {
  fill_rows(twins->q, tokens, kQueryHeads, 9);
  const pariskv_tensor q = rows_of(twins->q, tokens, kQueryHeads);
  const pariskv_tensor out = rows_of(twins->out, tokens, kQueryHeads);
  const pariskv_tensor other = rows_of(twins->other, tokens, kQueryHeads);
  const pariskv_tensor k = rows_of(twins->own.keys + at * kRow, tokens, kKvHeads);
  const pariskv_tensor v = rows_of(twins->own.values + at * kRow, tokens, kKvHeads);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    OK(pariskv_cache_attend_rows(twins->borrowing, layer, twins->lent_batch, &tokens, &q,
                                 twins->own.key_at + at, twins->own.value_at + at, &out, NULL,
                                 NULL));
    OK(pariskv_cache_attend(twins->copying, layer, twins->copied_batch, &tokens, &q, &k, &v, &other,
                            NULL, NULL));
    check_equal(twins, tokens);
  }
}

/** All rows of the program go to memory of its own; the old memory is gone. */
static void move_all(Twins* twins, int64_t tokens) {
  Program next = new_program(1);
  memcpy(next.keys, twins->own.keys, kTokens * kRow * sizeof(float));
  memcpy(next.values, twins->own.values, kTokens * kRow * sizeof(float));
  const int64_t begin = 0;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    OK(pariskv_cache_move_rows(twins->borrowing, layer, twins->lent_batch, &begin, &tokens,
                               next.key_at, next.value_at, NULL));
  }
  end_program(&twins->own);
  twins->own = next;
}

static void check_refusals(Twins* twins) {
  const int64_t one = 1, zero = 0, many = INT64_MAX, less = -1;
  pariskv_cache *cache = twins->borrowing, *copying = twins->copying;
  const pariskv_batch* batch = twins->lent_batch;
  const pariskv_tensor q = rows_of(twins->q, 1, kQueryHeads);
  const pariskv_tensor out = rows_of(twins->out, 1, kQueryHeads);
  const pariskv_tensor k = rows_of(twins->own.keys, 1, kKvHeads);
  const void* const* keys = twins->own.key_at;
  const void* const* values = twins->own.value_at;
#define WRONG(words, call) REFUSED(PARISKV_INVALID_ARGUMENT, words, call)
  WRONG("[prefill_rows] keys: expected 1 addresses, got a null pointer",
        pariskv_cache_prefill_rows(cache, 0, batch, &one, NULL, values, NULL, NULL));
  WRONG("[prefill_rows] values",
        pariskv_cache_prefill_rows(cache, 0, batch, &one, keys, NULL, NULL, NULL));
  WRONG("[prefill_rows] lengths",
        pariskv_cache_prefill_rows(cache, 0, batch, NULL, keys, values, NULL, NULL));
  WRONG("[prefill_rows] lengths",
        pariskv_cache_prefill_rows(cache, 0, batch, &less, keys, values, NULL, NULL));
  WRONG("[prefill_rows] lengths",
        pariskv_cache_prefill_rows(cache, 0, batch, &many, keys, values, NULL, NULL));
  WRONG("cache", pariskv_cache_prefill_rows(NULL, 0, batch, &one, keys, values, NULL, NULL));
  WRONG("batch", pariskv_cache_prefill_rows(cache, 0, NULL, &one, keys, values, NULL, NULL));
  WRONG("[decode_rows] q",
        pariskv_cache_decode_rows(cache, 0, batch, NULL, keys, values, &out, NULL, NULL));
  WRONG("[decode_rows] out",
        pariskv_cache_decode_rows(cache, 0, batch, &q, keys, values, NULL, NULL, NULL));
  WRONG("[decode_rows] keys",
        pariskv_cache_decode_rows(cache, 0, batch, &q, NULL, NULL, &out, NULL, NULL));
  WRONG("[attend_rows] values",
        pariskv_cache_attend_rows(cache, 0, batch, &one, &q, keys, NULL, &out, NULL, NULL));
  WRONG("[move_rows] begin",
        pariskv_cache_move_rows(cache, 0, batch, NULL, &one, keys, values, NULL));
  WRONG("[move_rows] positions",
        pariskv_cache_move_rows(cache, 0, batch, &many, &one, keys, values, NULL));
  WRONG("[rewrite_rows] layer", pariskv_cache_rewrite_rows(cache, kLayers, batch, NULL));
  WRONG("[rewrite_rows] rows", pariskv_cache_rewrite_rows(copying, 0, twins->copied_batch, NULL));
  WRONG("[decode] k", pariskv_cache_decode(cache, 0, batch, &q, &k, &k, &out, NULL, NULL));
  WRONG("[save]", pariskv_cache_save(cache, twins->lent, "/tmp/pariskv_borrowed"));
  OK(pariskv_cache_prefill_rows(cache, 0, batch, &zero, NULL, NULL, NULL, NULL));
  OK(pariskv_cache_move_rows(cache, 0, batch, &zero, &zero, NULL, NULL, NULL));
  pariskv_config config;
  pariskv_borrowed_rows rows;
  small_config(&config, NULL);
  OK(pariskv_borrowed_rows_init(&rows, sizeof rows));
  config.borrowed = &rows, rows.value = 4;
  WRONG("[config] borrowed.value: expected one of 0 (float32)", pariskv_config_validate(&config));
  rows.value = 0, rows.key_head_stride = 3;
  WRONG("[config] borrowed.key_head_stride", pariskv_config_validate(&config));
#undef WRONG
}

void test_borrowed_rows(void) {
  static Twins twins;
  twins.own = new_program(1);
  twins.borrowing = new_cache(1), twins.copying = new_cache(0);
  OK(pariskv_cache_add(twins.borrowing, &twins.lent));
  OK(pariskv_cache_add(twins.copying, &twins.copied));
  OK(pariskv_batch_create(twins.borrowing, &twins.lent, 1, &twins.lent_batch));
  OK(pariskv_batch_create(twins.copying, &twins.copied, 1, &twins.copied_batch));
  prefill_both(&twins, 200);
  for (int64_t at = 200; at < 240; ++at) decode_both(&twins, at);
  attend_both(&twins, 240, 8);
  move_all(&twins, 248);
  for (int64_t at = 248; at < 260; ++at) decode_both(&twins, at);
  check_refusals(&twins);
  const int64_t kept = 150;
  OK(pariskv_cache_truncate(twins.borrowing, twins.lent_batch, PARISKV_KEEP, &kept, NULL));
  OK(pariskv_cache_truncate(twins.copying, twins.copied_batch, PARISKV_KEEP, &kept, NULL));
  for (int64_t at = kept; at < 190; ++at) decode_both(&twins, at);
  pariskv_stats stats = {.size = sizeof stats}, others = {.size = sizeof others};
  OK(pariskv_cache_stats(twins.borrowing, &stats));
  OK(pariskv_cache_stats(twins.copying, &others));
  CHECK(stats.row_bytes < others.row_bytes / 8 && stats.tokens == others.tokens);
  CHECK(stats.summary_bytes == others.summary_bytes && stats.searched_tokens > 0);

  /* Other numbers where the rows are: a copying cache has to begin again. */
  const int64_t none = 0, all = 190;
  fill_rows(twins.own.keys, kTokens, kKvHeads, 50);
  fill_rows(twins.own.values, kTokens, kKvHeads, 51);
  OK(pariskv_cache_truncate(twins.borrowing, twins.lent_batch, PARISKV_KEEP, &none, NULL));
  OK(pariskv_cache_truncate(twins.copying, twins.copied_batch, PARISKV_KEEP, &none, NULL));
  prefill_both(&twins, all);
  fill_rows(twins.own.keys, kTokens, kKvHeads, 60);
  fill_rows(twins.own.values, kTokens, kKvHeads, 61);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    OK(pariskv_cache_rewrite_rows(twins.borrowing, layer, twins.lent_batch, NULL));
  }
  OK(pariskv_cache_truncate(twins.copying, twins.copied_batch, PARISKV_KEEP, &none, NULL));
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const pariskv_tensor k = rows_of(twins.own.keys, all, kKvHeads);
    const pariskv_tensor v = rows_of(twins.own.values, all, kKvHeads);
    OK(pariskv_cache_prefill(twins.copying, layer, twins.copied_batch, &all, &k, &v, NULL, NULL));
  }
  for (int64_t at = all; at < all + 20; ++at) decode_both(&twins, at);

  pariskv_batch_destroy(twins.lent_batch), pariskv_batch_destroy(twins.copied_batch);
  pariskv_cache_destroy(twins.borrowing), pariskv_cache_destroy(twins.copying);
  end_program(&twins.own);
}
