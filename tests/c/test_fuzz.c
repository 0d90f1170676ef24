/* Structs of random bytes and calls with random arguments: refused with a sentence, or done. */
#include <stdlib.h>

#include "check.h"
#include "model.h"

enum { kOut = kQueryHeads * kDim };

static uint64_t random_state = 48;

static uint64_t any(void) { return next_number(&random_state); }

/** Numbers that are near, far, at the limits of their type, or negative. */
static int64_t odd_number(void) {
  static const int64_t kEdges[] = {0,  1,       -1,        2,         63,       64,
                                   65, 1 << 23, INT32_MAX, INT64_MAX, INT64_MIN};
  switch (any() % 4) {
    case 0:
      return kEdges[any() % (sizeof kEdges / sizeof kEdges[0])];
    case 1:
      return (int64_t)(any() % 300) - 20;
    case 2:
      return (int64_t)any();
    default:
      return (int64_t)(any() % 2000000) - 1000000;
  }
}

/** Random bytes over a part of a struct that holds no pointers. */
static void scribble(void* begin, const void* end) {
  const size_t bytes = (size_t)((const char*)end - (const char*)begin);
  const size_t at = any() % bytes, count = 1 + any() % 8;
  for (size_t i = at; i < bytes && i < at + count; ++i)
    ((unsigned char*)begin)[i] = (unsigned char)any();
}

/** Sets one field of 8 bytes to an odd number. */
static void set_field(void* begin, const void* end) {
  const size_t fields = (size_t)((const char*)end - (const char*)begin) / 8;
  const int64_t number = odd_number();
  memcpy((char*)begin + 8 * (any() % fields), &number, 8);
}

static void change(void* begin, const void* end) {
  for (uint64_t i = any() % 3; i < 3; ++i) {
    if (any() % 2 == 0)
      scribble(begin, end);
    else
      set_field(begin, end);
  }
}

/** A refusal has a sentence of its own, which names the verb. */
static void check_answer(pariskv_status status) {
  CHECK(status >= PARISKV_OK && status <= PARISKV_STOPPED);
  if (status != PARISKV_OK) CHECK(pariskv_last_error()[0] == '[');
}

/** Work for a cache that asks for many threads: none are started. */
static void run_alone(void* user, int64_t times, pariskv_task task, void* context) {
  (void)user, (void)times;
  task(context);
}

void test_fuzzed_configs(void) {
  const pariskv_executor executor = {sizeof executor, NULL, run_alone};
  const pariskv_resources resources = {sizeof resources, NULL, NULL, NULL, &executor, NULL, NULL};
  int created = 0;
  for (int round = 0; round < 20000; ++round) {
    pariskv_config config;
    pariskv_policy_pariskv policy;
    pariskv_policy_hardkv kept;
    pariskv_policy_prkv paged;
    pariskv_schedule_step steps[2] = {{0, .5, .5}, {100, .2, .2}};
    small_config(&config, &policy);
    pariskv_policy_hardkv_init(&kept, sizeof kept), pariskv_policy_prkv_init(&paged, sizeof paged);
    policy.schedule = steps, policy.schedule_steps = 2;
    pariskv_borrowed_rows rows;
    pariskv_borrowed_rows_init(&rows, sizeof rows);
    switch (any() % 9) {
      case 7:
        config.borrowed = &rows;
        change(&rows, &rows + 1);
        break;
      case 0:
        change(&config, &config.pariskv);
        break;
      case 1:
        change(&config.device, &config.borrowed);
        break;
      case 2:
        change(&policy, &policy.schedule);
        break;
      case 3:
        change(&policy.min_candidates_per_row, &policy + 1);
        break;
      case 4:
        change(&steps, &steps[1] + 1);
        break;
      case 5:
        config.pariskv = NULL, config.hardkv = &kept;
        change(&kept, &kept + 1);
        break;
      case 6:
        config.pariskv = NULL, config.prkv = &paged;
        change(&paged, &paged + 1);
        break;
      default: /* random bytes alone, pointers aside */
        for (size_t i = 0; i < offsetof(pariskv_config, pariskv); ++i) {
          ((unsigned char*)&config)[i] = (unsigned char)any();
        }
        if (any() % 2 == 0) config.size = sizeof config;
    }
    pariskv_cache* cache = NULL;
    const pariskv_status status = pariskv_cache_create(&config, &resources, &cache);
    check_answer(status);
    CHECK((status == PARISKV_OK) == (cache != NULL));
    CHECK((pariskv_config_validate(&config) == PARISKV_OK) || status != PARISKV_OK);
    created += cache != NULL;
    pariskv_cache_destroy(cache);
  }
  CHECK(created > 100);
}

/** A cache with a sequence, for calls that are to leave it as it is. */
typedef struct {
  pariskv_cache* cache;
  pariskv_sequence sequence;
  pariskv_batch* batch;
  pariskv_stats before;
} Victim;

static Victim new_victim(void) {
  Victim victim = {NULL, -1, NULL, {.size = sizeof victim.before}};
  pariskv_config config;
  pariskv_policy_pariskv policy;
  small_config(&config, &policy);
  OK(pariskv_cache_create(&config, NULL, &victim.cache));
  OK(pariskv_cache_add(victim.cache, &victim.sequence));
  OK(add_prompt(victim.cache, victim.sequence, 200, 1));
  OK(pariskv_batch_create(victim.cache, &victim.sequence, 1, &victim.batch));
  OK(pariskv_cache_stats(victim.cache, &victim.before));
  return victim;
}

static void check_unchanged(Victim* victim) {
  pariskv_stats now = {.size = sizeof now};
  OK(pariskv_cache_stats(victim->cache, &now));
  CHECK(now.tokens == victim->before.tokens && now.sequences == victim->before.sequences);
  CHECK(now.row_bytes == victim->before.row_bytes && now.flushes == victim->before.flushes);
}

static void end_victim(Victim* victim) {
  pariskv_batch_destroy(victim->batch);
  pariskv_cache_destroy(victim->cache);
}

/**
 * Tensors with a field or some bytes changed. Strides stay small enough for what is accepted to lie
 * within the memory around the rows; the far ones are there to be refused.
 */
static void change_tensor(pariskv_tensor* tensor) {
  switch (any() % 4) {
    case 0:
      change(&tensor->dtype, &tensor->shape[0]);
      break;
    case 1:
      tensor->shape[any() % 4] = odd_number();
      break;
    case 2:
      tensor->strides[any() % 4] =
          any() % 8 == 0 ? INT64_MAX - (int64_t)(any() % 1000) : (int64_t)(any() % 4000) - 2000;
      break;
    default:
      tensor->size = any() % 3 == 0 ? (size_t)odd_number() : sizeof *tensor;
      if (any() % 2 == 0) {
        tensor->data = NULL;
      } else if (tensor->data != NULL) {
        tensor->data = (char*)tensor->data + any() % 8;
      }
  }
}

void test_fuzzed_tensors(void) {
  enum { kAround = 1 << 16 };
  float* memory = calloc(8 * kAround, sizeof *memory);
  Victim victim = new_victim();
  int done = 0;
  for (int round = 0; round < 20000; ++round) {
    pariskv_tensor tensors[4]; /* q, k, v, out, each in the middle of memory of its own */
    for (int i = 0; i < 4; ++i) {
      const int64_t heads = i == 1 || i == 2 ? kKvHeads : kQueryHeads;
      tensors[i] = rows_of(memory + (2 * i + 1) * kAround, 1, heads);
    }
    for (uint64_t i = any() % 2; i < 2; ++i) change_tensor(&tensors[any() % 4]);
    const int64_t one = 1;
    pariskv_status status;
    switch (any() % 4) {
      case 0:
        status = pariskv_cache_decode(victim.cache, 0, victim.batch, &tensors[0], NULL, NULL,
                                      &tensors[3], NULL, NULL);
        break;
      case 1:
        status =
            pariskv_cache_read(victim.cache, 1, victim.sequence, 3, &tensors[1], &tensors[2], NULL);
        break;
      case 2:
        status = pariskv_cache_attend(victim.cache, 0, victim.batch, &one, &tensors[0], NULL, NULL,
                                      &tensors[3], NULL, NULL);
        break;
      default: { /* with a layer that there is not: tensors are refused, or that is */
        status = pariskv_cache_decode(victim.cache, kLayers, victim.batch, &tensors[0], &tensors[1],
                                      &tensors[2], &tensors[3], NULL, NULL);
        CHECK(status == PARISKV_INVALID_ARGUMENT);
      }
    }
    check_answer(status);
    done += status == PARISKV_OK;
    if (round % 100 == 0) check_unchanged(&victim);
  }
  CHECK(done > 100);
  check_unchanged(&victim);
  end_victim(&victim);
  free(memory);
}

void test_fuzzed_calls(void) {
  float rows[kOut], result[kOut];
  fill_rows(rows, 1, kQueryHeads, 1);
  Victim victim = new_victim();
  for (int round = 0; round < 20000; ++round) {
    const pariskv_tensor q = rows_of(rows, 1, kQueryHeads), out = rows_of(result, 1, kQueryHeads);
    const pariskv_tensor k = rows_of(rows, 1, kKvHeads), v = rows_of(result, 1, kKvHeads);
    pariskv_tensor flat = q;
    flat.rank = 2, flat.shape[0] = kQueryHeads, flat.shape[1] = kDim, flat.strides[0] = kDim;
    flat.strides[1] = 1;
    pariskv_attend_options options = {sizeof options, 0,    0,   NULL, NULL, NULL, 0, 0,
                                      NULL,           NULL, NULL};
    change(&options, &options.sink_bias);
    const int64_t number = odd_number(), layer = any() % 2 ? odd_number() : 0;
    const pariskv_sequence id = any() % 2 ? odd_number() : victim.sequence;
    pariskv_sequence made = -1;
    pariskv_status status = PARISKV_OK;
    int64_t count = 0;
    const pariskv_explanation* why = NULL;
    pariskv_batch* batch = NULL;
    switch (any() % 9) {
      case 0:
        check_answer(pariskv_cache_length(victim.cache, id, layer, &count));
        break;
      case 1:
        check_answer(pariskv_cache_read(victim.cache, layer, id, number, &k, &v, NULL));
        break;
      case 2:
        check_answer(pariskv_cache_explain(victim.cache, layer, id, &flat, &options, NULL, &why));
        pariskv_explanation_destroy(why);
        break;
      case 3: {
        const int64_t lengths[1] = {number == 1 ? 0 : number}; /* one row is there */
        check_answer(pariskv_cache_attend(victim.cache, layer, victim.batch, lengths, &q, NULL,
                                          NULL, &out, &options, NULL));
        break;
      }
      case 4:
        check_answer(pariskv_cache_decode(victim.cache, layer, victim.batch, &q, NULL, NULL, &out,
                                          &options, NULL));
        break;
      case 5:
        status = any() % 2 ? pariskv_cache_fork_prefix(victim.cache, id, number, NULL, &made)
                           : pariskv_cache_fork(victim.cache, id, NULL, &made);
        check_answer(status);
        if (status == PARISKV_OK) {
          OK(pariskv_batch_create(victim.cache, &made, 1, &batch));
          check_answer(
              pariskv_cache_truncate(victim.cache, batch, (int32_t)(any() % 3), &number, NULL));
          check_answer(pariskv_cache_reorder(victim.cache, batch, &number, NULL));
          pariskv_batch_destroy(batch);
          OK(pariskv_cache_remove(victim.cache, made, NULL));
        }
        break;
      case 6: {
        const pariskv_sequence some[3] = {id, odd_number(), odd_number()};
        check_answer(pariskv_batch_create(victim.cache, some, (int64_t)(any() % 4), &batch));
        pariskv_batch_destroy(batch);
        break;
      }
      case 7:
        if (id != victim.sequence) check_answer(pariskv_cache_remove(victim.cache, id, NULL));
        break;
      default:
        check_answer(pariskv_cache_truncate(victim.cache, victim.batch, PARISKV_DROP,
                                            &(int64_t){number > 0 && number <= 200 ? 0 : number},
                                            NULL));
    }
    if (round % 100 == 0) check_unchanged(&victim);
  }
  check_unchanged(&victim);
  end_victim(&victim);
}
