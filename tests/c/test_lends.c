/* Memory and threads of the program, and its word that a call shall stop. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "model.h"

enum { kOut = kQueryHeads * kDim };

/** Memory that is counted, and refused from some allocation on. */
typedef struct {
  int64_t calls, live, refuse_from;
  size_t offset; /* of addresses from where they should be */
} Pool;

static void* take(void* user, size_t bytes, size_t alignment) {
  Pool* pool = user;
  if (pool->refuse_from >= 0 && pool->calls >= pool->refuse_from) return NULL;
  ++pool->calls;
  char* data = NULL;
  if (posix_memalign((void**)&data, alignment < 64 ? 64 : alignment, bytes + 64) != 0) return NULL;
  pool->live += (int64_t)bytes;
  return data + pool->offset;
}

static void give_back(void* user, void* data, size_t bytes, size_t alignment) {
  Pool* pool = user;
  (void)alignment;
  pool->live -= (int64_t)bytes;
  free((char*)data - pool->offset);
}

static pariskv_cache* cache_with(const pariskv_resources* resources, int64_t threads) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  small_config(&config, &policy);
  config.threads = threads;
  pariskv_cache* cache = NULL;
  OK(pariskv_cache_create(&config, resources, &cache));
  return cache;
}

void test_memory(void) {
  Pool pool = {0, 0, -1, 0};
  const pariskv_memory memory = {sizeof memory, &pool, take, give_back};
  pariskv_resources resources = {sizeof resources, &memory, NULL, NULL, NULL, NULL, NULL};
  pariskv_cache* cache = cache_with(&resources, 1);
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  OK(add_prompt(cache, sequence, 300, 1));
  pariskv_stats stats = {.size = sizeof stats};
  OK(pariskv_cache_stats(cache, &stats));
  CHECK(pool.live >= stats.memory_live && stats.memory_live >= stats.row_bytes);
  /* Refused at each allocation of a prompt, by turns: nothing is added. */
  int refusals = 0;
  for (int64_t more = 0;; ++more) {
    pool.refuse_from = pool.calls + more;
    const pariskv_status status = add_prompt(cache, sequence, 1200, 2);
    if (status == PARISKV_OK) break;
    CHECK(status == PARISKV_OUT_OF_MEMORY);
    CHECK(strstr(pariskv_last_error(), "the memory resource has none") != NULL);
    int64_t first = 0;
    OK(pariskv_cache_length(cache, sequence, 1, &first));
    CHECK(first == 300); /* the last layer is the one that did not come */
    /* The first layer may have its share: the prompt begins anew. */
    pariskv_batch* batch = NULL;
    const int64_t keep = 300;
    OK(pariskv_batch_create(cache, &sequence, 1, &batch));
    OK(pariskv_cache_truncate(cache, batch, PARISKV_KEEP, &keep, NULL));
    pariskv_batch_destroy(batch);
    OK(pariskv_cache_trim(cache));
    ++refusals;
  }
  CHECK(refusals >= 2);
  pariskv_cache_destroy(cache);
  CHECK(pool.live == 0);

  pool.refuse_from = -1, pool.offset = 8;
  cache = cache_with(&resources, 1);
  OK(pariskv_cache_add(cache, &sequence));
  REFUSED(PARISKV_INVALID_ARGUMENT, "multiple of", add_prompt(cache, sequence, 300, 1));
  pariskv_cache_destroy(cache);
  CHECK(pool.live == 0);

  const pariskv_memory half = {sizeof half, NULL, take, NULL};
  pariskv_config config;
  small_config(&config, NULL);
  resources.host = &half;
  REFUSED(PARISKV_INVALID_ARGUMENT, "[resources] host.deallocate",
          pariskv_cache_create(&config, &resources, &cache));
}

/** A task for some threads, and how often it was lent. */
typedef struct {
  pariskv_task task;
  void* context;
} Share;

static void* help(void* share) {
  ((Share*)share)->task(((Share*)share)->context);
  return NULL;
}

static void run_on_threads(void* user, int64_t times, pariskv_task task, void* context) {
  Share share = {task, context};
  pthread_t threads[8];
  int64_t begun = 0;
  *(int64_t*)user += 1;
  while (begun < times - 1 && begun < 8 && !pthread_create(&threads[begun], NULL, help, &share)) {
    ++begun;
  }
  task(context);
  while (begun > 0) pthread_join(threads[--begun], NULL);
}

void test_executor(void) {
  int64_t runs = 0;
  const pariskv_executor executor = {sizeof executor, &runs, run_on_threads};
  pariskv_resources resources = {sizeof resources, NULL, NULL, NULL, &executor, NULL, NULL};
  pariskv_cache *cache = cache_with(&resources, 3), *plain = cache_with(NULL, 1);
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  OK(pariskv_cache_add(plain, &sequence));
  OK(add_prompt(cache, sequence, 700, 1));
  OK(add_prompt(plain, sequence, 700, 1));
  float one[kOut], other[kOut];
  for (uint64_t i = 0; i < 20; ++i) {
    OK(decode_one(cache, sequence, i, one));
    OK(decode_one(plain, sequence, i, other));
    CHECK(memcmp(one, other, sizeof one) == 0);
  }
  CHECK(runs > 40);
  pariskv_cache_destroy(cache), pariskv_cache_destroy(plain);

  const pariskv_executor empty = {sizeof empty, NULL, NULL};
  pariskv_config config;
  small_config(&config, NULL);
  resources.executor = &empty;
  REFUSED(PARISKV_INVALID_ARGUMENT, "[resources] executor.run",
          pariskv_cache_create(&config, &resources, &cache));
}

static int32_t asked(void* user) {
  int64_t* left = user;
  return (*left)-- == 0;
}

void test_stop(void) {
  int64_t left = -1;
  pariskv_resources resources = {sizeof resources, NULL, NULL, NULL, NULL, asked, &left};
  pariskv_cache *cache = cache_with(&resources, 1), *plain = cache_with(NULL, 1);
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  OK(pariskv_cache_add(plain, &sequence));
  OK(add_prompt(cache, sequence, 300, 1));
  OK(add_prompt(plain, sequence, 300, 1));
  float one[kOut], other[kOut];
  left = 3;
  REFUSED(PARISKV_STOPPED, "told to stop", decode_one(cache, sequence, 2, one));
  left = -1;
  OK(decode_one(cache, sequence, 2, one));
  OK(decode_one(plain, sequence, 2, other));
  CHECK(memcmp(one, other, sizeof one) == 0);
  pariskv_cache_destroy(cache), pariskv_cache_destroy(plain);
}

static void* fail_here(void* said) {
  snprintf(said, 8, "%s", pariskv_last_error());
  pariskv_cache_trim(NULL);
  return NULL;
}

void test_errors_of_threads(void) {
  pariskv_config config;
  REFUSED(PARISKV_INVALID_ARGUMENT, "config_init", pariskv_config_init(&config, 1));
  char kept[512], said[8] = "unset";
  snprintf(kept, sizeof kept, "%s", pariskv_last_error());
  pthread_t other;
  CHECK(pthread_create(&other, NULL, fail_here, said) == 0);
  pthread_join(other, NULL);
  CHECK(said[0] == '\0'); /* a new thread has had no failure */
  CHECK(strcmp(kept, pariskv_last_error()) == 0);
  OK(pariskv_config_init(&config, sizeof config)); /* success leaves the sentence */
  CHECK(strcmp(kept, pariskv_last_error()) == 0);
}
