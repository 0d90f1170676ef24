/* The three policies: their settings arrive, their explanations come back. */
#include <stdlib.h>

#include "check.h"
#include "model.h"

enum { kOut = kQueryHeads * kDim };

/** A cache with this config, 1,200 tokens, some steps; its explanation of a query. */
static const pariskv_explanation* explained(const pariskv_config* config, pariskv_cache** cache) {
  pariskv_sequence sequence = -1;
  *cache = NULL;
  OK(pariskv_cache_create(config, NULL, cache));
  OK(pariskv_cache_add(*cache, &sequence));
  OK(add_prompt(*cache, sequence, 1200, 1));
  float out[kOut];
  for (uint64_t i = 0; i < 20; ++i) OK(decode_one(*cache, sequence, 10 + i, out));
  float query[kOut];
  fill_rows(query, 1, kQueryHeads, 9);
  const int64_t shape[2] = {kQueryHeads, kDim};
  pariskv_tensor q;
  OK(pariskv_tensor_init(&q, sizeof q, query, PARISKV_FLOAT32, 2, shape));
  const pariskv_explanation* explanation = NULL;
  OK(pariskv_cache_explain(*cache, 1, sequence, &q, NULL, NULL, &explanation));
  CHECK(explanation != NULL && explanation->size == sizeof *explanation);
  CHECK(explanation->kv_heads == kKvHeads && explanation->query_heads == kQueryHeads);
  CHECK(explanation->zone_tokens > 1000);
  return explanation;
}

/** The zone's summaries: as the policy makes them. */
static void check_summaries(const pariskv_cache* cache, int has_codes, int has_pages) {
  const pariskv_summaries* found = NULL;
  OK(pariskv_cache_summaries(cache, 1, 0, &found));
  CHECK(found != NULL && found->size == sizeof *found);
  CHECK(found->kv_heads == (has_codes || has_pages ? kKvHeads : 0));
  CHECK((found->signs != NULL) == has_codes && (found->norms != NULL) == has_codes);
  CHECK((found->means != NULL) == has_codes && (found->balance != NULL) == has_codes);
  CHECK((found->middles != NULL) == has_pages && (found->distances != NULL) == has_pages);
  for (int64_t i = 0; found->norms != NULL && i < kKvHeads * found->tokens; ++i) {
    CHECK(found->norms[i] > 0);
  }
  pariskv_summaries_destroy(found);
}

/** Positions of one list: in the zone, or -1 for none. */
static void check_positions(const pariskv_explanation* explanation, const int64_t* positions,
                            int64_t width) {
  CHECK(positions != NULL && width > 0);
  for (int64_t i = 0; positions != NULL && i < kKvHeads * width; ++i) {
    const int64_t in_zone = positions[i] - explanation->zone_begin;
    CHECK(positions[i] == -1 || (in_zone >= 0 && in_zone < explanation->zone_tokens));
  }
}

static void check_pariskv(void) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  small_config(&config, &policy);
  const pariskv_schedule_step steps[2] = {{0, .5, .5}, {100, .25, .25}};
  policy.block = 64, policy.top_k = 7, policy.schedule = steps, policy.schedule_steps = 2;
  pariskv_cache* cache;
  const pariskv_explanation* found = explained(&config, &cache);
  CHECK(found->searched == 1 && found->selected == 7);
  check_positions(found, found->positions, found->selected);
  check_positions(found, found->candidate_positions, found->candidates);
  CHECK(found->worth && found->exact && found->coarse && found->estimated);
  CHECK(found->error && found->mass && found->mass[0] > 0 && found->mass[0] <= 1);
  CHECK(found->held == NULL && found->pages == NULL && found->kept == NULL);
  pariskv_explanation_destroy(found);
  check_summaries(cache, 1, 0);

  pariskv_config own = {.size = sizeof own};
  OK(pariskv_cache_config(cache, &own));
  CHECK(own.layers == kLayers && own.value_dim == kDim && own.hardkv == NULL && own.prkv == NULL);
  CHECK(own.sink == 2 && own.update == 16 && own.dtype == PARISKV_FLOAT32);
  CHECK(own.pariskv != NULL && own.pariskv->top_k == 7 && own.pariskv->schedule_steps == 2);
  CHECK(own.pariskv->schedule[1].from_tokens == 100 && own.pariskv->tail == PARISKV_TAIL_SAMPLE);
  CHECK(own.pariskv->seed == 42 && own.pariskv->secret_seed == 0);
  /* What a cache says of its config makes an equal cache. */
  pariskv_cache* twin = NULL;
  OK(pariskv_cache_create(&own, NULL, &twin));
  pariskv_cache_destroy(twin);
  pariskv_cache_destroy(cache);

  policy.secret_seed = 1, policy.seed = 7;
  found = explained(&config, &cache);
  CHECK(found->searched == 1 && found->selected == 7);
  pariskv_explanation_destroy(found);
  OK(pariskv_cache_config(cache, &own));
  CHECK(own.pariskv->secret_seed == 1 && own.pariskv->seed == 42); /* of the signs */
  OK(pariskv_cache_create(&own, NULL, &twin));
  pariskv_cache_destroy(twin);
  pariskv_cache_destroy(cache);

  config.pariskv = NULL, config.sink = -1, config.local = -1; /* the policy's own */
  OK(pariskv_cache_create(&config, NULL, &cache));
  OK(pariskv_cache_config(cache, &own));
  CHECK(own.sink == 4 && own.local == 256 && own.pariskv->top_k == 100);
  CHECK(own.pariskv->block == 64 && own.pariskv->error == 0);
  pariskv_cache_destroy(cache);
}

static void check_hardkv(void) {
  pariskv_config config;
  pariskv_policy_hardkv policy;
  small_config(&config, NULL);
  OK(pariskv_policy_hardkv_init(&policy, sizeof policy));
  CHECK(policy.most == 2048 && policy.p == .9 && policy.pool == 7);
  policy.most = 64, config.hardkv = &policy;
  pariskv_cache* cache;
  const pariskv_explanation* found = explained(&config, &cache);
  check_positions(found, found->kept, found->kept_width);
  CHECK(found->kept_width <= 64 && found->page_scores == NULL && found->coarse == NULL);
  check_summaries(cache, 0, 0);
  pariskv_explanation_destroy(found);
  pariskv_config own = {.size = sizeof own};
  OK(pariskv_cache_config(cache, &own));
  CHECK(own.pariskv == NULL && own.hardkv != NULL && own.hardkv->most == 64);
  pariskv_cache_destroy(cache);
}

static void check_prkv(void) {
  pariskv_config config;
  pariskv_policy_prkv policy;
  small_config(&config, NULL);
  OK(pariskv_policy_prkv_init(&policy, sizeof policy));
  CHECK(policy.budget == 1024 && policy.static_share == .25 && policy.page == 32);
  policy.budget = 256, policy.static_share = -1, config.prkv = &policy;
  pariskv_cache* cache;
  const pariskv_explanation* found = explained(&config, &cache);
  CHECK(found->page_scores != NULL && found->pages != NULL && found->pages_width > 0);
  CHECK(found->zone_pages > 1000 / 32);
  check_summaries(cache, 0, 1);
  pariskv_explanation_destroy(found);
  pariskv_config own = {.size = sizeof own};
  OK(pariskv_cache_config(cache, &own));
  CHECK(own.prkv != NULL && own.prkv->budget == 256 && own.prkv->static_share == -1);
  pariskv_cache_destroy(cache);
}

void test_policies(void) {
  check_pariskv();
  check_hardkv();
  check_prkv();
}
