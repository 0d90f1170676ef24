/* Wrong input of each kind: a status, a sentence that names the argument, and nothing changed. */
#include <stdlib.h>

#include "check.h"
#include "model.h"

#define WRONG(words, call) REFUSED(PARISKV_INVALID_ARGUMENT, words, call)

enum { kOut = kQueryHeads * kDim };

static void check_config(void) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  pariskv_policy_hardkv kept;
  pariskv_policy_prkv paged;
  pariskv_cache* cache = NULL;
  small_config(&config, &policy);
  pariskv_policy_hardkv_init(&kept, sizeof kept);
  pariskv_policy_prkv_init(&paged, sizeof paged);

  WRONG("[config]: expected a pariskv_config", pariskv_cache_create(NULL, NULL, &cache));
  WRONG("[cache_create] cache", pariskv_cache_create(&config, NULL, NULL));
  WRONG("[config]: expected a pariskv_config", pariskv_config_validate(NULL));
  WRONG("multiple of 8 bytes",
        pariskv_config_validate((const pariskv_config*)(const void*)((const char*)&config + 1)));
  OK(pariskv_config_validate(&config));

#define FIELD(field, value, words)                             \
  do {                                                         \
    const pariskv_config whole = config;                       \
    config.field = value;                                      \
    WRONG(words, pariskv_config_validate(&config));            \
    WRONG(words, pariskv_cache_create(&config, NULL, &cache)); \
    config = whole;                                            \
  } while (0)
  FIELD(layers, 0, "[config] layers: expected 1 to");
  FIELD(kv_heads, -3, "[config] kv_heads");
  FIELD(query_heads, 5, "[config] query_heads");
  FIELD(head_dim, 65, "[config] head_dim");
  FIELD(dtype, 3, "[config] dtype: expected one of 0 (float32), 1 (float16), 2 (bfloat16), got 3");
  FIELD(kv_dtype, -1, "[config] kv_dtype");
  FIELD(device, 2, "[config] device: expected one of 0 (cpu), 1 (cuda), got 2");
  FIELD(placement, 9, "[config] placement");
  FIELD(threads, 5000, "[config] threads");
  FIELD(reserved, 1, "[config].reserved: expected 0");
  FIELD(hardkv, &kept, "the settings of one policy at most, got 2");
#undef FIELD

#define FIELD(settings, field, value, words)        \
  do {                                              \
    const double whole = (double)settings.field;    \
    settings.field = value;                         \
    WRONG(words, pariskv_config_validate(&config)); \
    settings.field = (int32_t)whole;                \
  } while (0)
  FIELD(policy, top_k, 0, "policy.top_k");
  FIELD(policy, scorer, 2, "[config] pariskv.scorer");
  FIELD(policy, group_rule, 2, "[config] pariskv.group_rule");
  FIELD(policy, tail, 3, "[config] pariskv.tail");
  FIELD(policy, error, 2, "policy.error");
  FIELD(policy, schedule_steps, -1, "[config] pariskv.schedule_steps");
  FIELD(policy, schedule_steps, 2, "[config] pariskv.schedule: expected 2 steps, got a null");
  FIELD(policy, secret_seed, 7, "[config] pariskv.secret_seed: expected 0 or 1, got 7");
  config.pariskv = NULL, config.hardkv = &kept;
  FIELD(kept, metric, 2, "[config] hardkv.metric");
  FIELD(kept, placement, -7, "[config] hardkv.placement");
  FIELD(kept, pool, 4, "policy.pool");
  config.hardkv = NULL, config.prkv = &paged;
  FIELD(paged, digest, 2, "[config] prkv.digest");
  FIELD(paged, page, 7, "policy.page");
  FIELD(paged, reserved, 1, "[config] prkv.reserved");
  paged.static_share = -2;
  WRONG("policy.static_share", pariskv_config_validate(&config));
#undef FIELD
}

/** Null in the place of each pointer. */
static void check_nulls(pariskv_cache* cache, pariskv_sequence sequence, pariskv_batch* batch) {
  float rows[kOut], result[kOut];
  const pariskv_tensor q = rows_of(rows, 1, kQueryHeads), out = rows_of(result, 1, kQueryHeads);
  const pariskv_tensor k = rows_of(rows, 1, kKvHeads), v = k;
  const int64_t one = 1;
  const char* no_cache = "cache: expected a cache, got a null pointer";
  const char* no_batch = "batch: expected a batch, got a null pointer";
  int64_t number = 0;
  pariskv_batch* made = NULL;
  pariskv_stats stats = {.size = sizeof stats};
  pariskv_pages pages = {.size = sizeof pages};
  pariskv_page_table table = {.size = sizeof table};
  pariskv_bytes bytes = {sizeof bytes, 0, 0};
  pariskv_config config = {.size = sizeof config};
  pariskv_region_counts counts = {sizeof counts, 0, 0, 0, 0, 0};
  const pariskv_explanation* why = NULL;
  const pariskv_summaries* all = NULL;

  WRONG(no_cache, pariskv_cache_add(NULL, &number));
  WRONG("[add] sequence", pariskv_cache_add(cache, NULL));
  WRONG(no_cache, pariskv_cache_remove(NULL, sequence, NULL));
  WRONG(no_cache, pariskv_cache_fork(NULL, sequence, NULL, &number));
  WRONG("[fork] forked", pariskv_cache_fork(cache, sequence, NULL, NULL));
  WRONG(no_cache, pariskv_cache_fork_prefix(NULL, sequence, 1, NULL, &number));
  WRONG("[fork] forked", pariskv_cache_fork_prefix(cache, sequence, 1, NULL, NULL));
  WRONG("[fork] tokens", pariskv_cache_fork_prefix(cache, sequence, 0, NULL, &number));
  WRONG(no_cache, pariskv_batch_create(NULL, &sequence, 1, &made));
  WRONG("[batch] batch", pariskv_batch_create(cache, &sequence, 1, NULL));
  WRONG("[batch] sequences", pariskv_batch_create(cache, NULL, 1, &made));
  WRONG("[batch] count", pariskv_batch_create(cache, &sequence, -1, &made));
  WRONG("[batch] count", pariskv_batch_create(cache, &sequence, INT64_MAX, &made));
  WRONG(no_cache, pariskv_cache_reorder(NULL, batch, &one, NULL));
  WRONG(no_cache, pariskv_cache_reserve(NULL, 1, 1));
  WRONG("[reserve] tokens", pariskv_cache_reserve(cache, 0, 1));
  WRONG("[reserve] sequences", pariskv_cache_reserve(cache, 1, 0));
  WRONG(no_cache, pariskv_cache_reserve_device(NULL, 1));
  WRONG("[reserve_device] bytes: expected 1 or more", pariskv_cache_reserve_device(cache, 0));
  WRONG("[reserve_device] expected a cache on a GPU", pariskv_cache_reserve_device(cache, 1));
  WRONG(no_cache, pariskv_cache_reserve_host(NULL, 1, 0));
  WRONG("[reserve_host] expected a cache with rows in host memory",
        pariskv_cache_reserve_host(cache, 1, 0));
  WRONG("[bytes_per_token] bytes", pariskv_config_bytes_per_token(&config, 1, NULL));
  WRONG("[bytes_per_token] most_tokens", pariskv_config_bytes_per_token(&config, 0, &bytes));
  WRONG("[bytes_per_sequence] multiple", pariskv_config_bytes_per_sequence(&config, 1, 0, &bytes));
  WRONG("[config]", pariskv_config_bytes_per_sequence(NULL, 1, 1, &bytes));
  WRONG(no_batch, pariskv_cache_reorder(cache, NULL, &one, NULL));
  WRONG("[reorder] source", pariskv_cache_reorder(cache, batch, NULL, NULL));
  WRONG(no_cache, pariskv_cache_truncate(NULL, batch, PARISKV_DROP, &one, NULL));
  WRONG(no_batch, pariskv_cache_truncate(cache, NULL, PARISKV_DROP, &one, NULL));
  WRONG("[truncate] tokens", pariskv_cache_truncate(cache, batch, PARISKV_DROP, NULL, NULL));
  WRONG("[truncate] cut", pariskv_cache_truncate(cache, batch, 2, &one, NULL));
  WRONG(no_cache, pariskv_cache_prefill(NULL, 0, batch, &one, &k, &v, NULL, NULL));
  WRONG(no_batch, pariskv_cache_prefill(cache, 0, NULL, &one, &k, &v, NULL, NULL));
  WRONG("[prefill] lengths", pariskv_cache_prefill(cache, 0, batch, NULL, &k, &v, NULL, NULL));
  WRONG("[prefill] k", pariskv_cache_prefill(cache, 0, batch, &one, NULL, &v, NULL, NULL));
  WRONG("[prefill] v", pariskv_cache_prefill(cache, 0, batch, &one, &k, NULL, NULL, NULL));
  WRONG(no_cache, pariskv_cache_decode(NULL, 0, batch, &q, &k, &v, &out, NULL, NULL));
  WRONG(no_batch, pariskv_cache_decode(cache, 0, NULL, &q, &k, &v, &out, NULL, NULL));
  WRONG("[decode] q", pariskv_cache_decode(cache, 0, batch, NULL, &k, &v, &out, NULL, NULL));
  WRONG("[decode] k", pariskv_cache_decode(cache, 0, batch, &q, NULL, &v, &out, NULL, NULL));
  WRONG("[decode] v", pariskv_cache_decode(cache, 0, batch, &q, &k, NULL, &out, NULL, NULL));
  WRONG("[decode] out", pariskv_cache_decode(cache, 0, batch, &q, &k, &v, NULL, NULL, NULL));
  WRONG(no_cache, pariskv_cache_attend(NULL, 0, batch, &one, &q, &k, &v, &out, NULL, NULL));
  WRONG(no_batch, pariskv_cache_attend(cache, 0, NULL, &one, &q, &k, &v, &out, NULL, NULL));
  WRONG("[attend] lengths",
        pariskv_cache_attend(cache, 0, batch, NULL, &q, &k, &v, &out, NULL, NULL));
  WRONG("[attend] q", pariskv_cache_attend(cache, 0, batch, &one, NULL, &k, &v, &out, NULL, NULL));
  WRONG("[attend] k", pariskv_cache_attend(cache, 0, batch, &one, &q, NULL, &v, &out, NULL, NULL));
  WRONG("[attend] out", pariskv_cache_attend(cache, 0, batch, &one, &q, &k, &v, NULL, NULL, NULL));
  WRONG(no_cache, pariskv_cache_advance(NULL, batch, NULL));
  WRONG(no_batch, pariskv_cache_advance(cache, NULL, NULL));
  WRONG(no_cache, pariskv_cache_flush(NULL, batch, NULL));
  WRONG(no_batch, pariskv_cache_flush(cache, NULL, NULL));
  WRONG(no_cache, pariskv_cache_flush_all(NULL, NULL));
  WRONG(no_cache, pariskv_cache_explain(NULL, 0, sequence, &q, NULL, NULL, &why));
  WRONG("[explain] q", pariskv_cache_explain(cache, 0, sequence, NULL, NULL, NULL, &why));
  WRONG("[explain] explanation", pariskv_cache_explain(cache, 0, sequence, &q, NULL, NULL, NULL));
  WRONG(no_cache, pariskv_cache_summaries(NULL, 0, sequence, &all));
  WRONG("[summaries] summaries", pariskv_cache_summaries(cache, 0, sequence, NULL));
  WRONG("[summaries] layer", pariskv_cache_summaries(cache, 7, sequence, &all));
  WRONG(no_cache, pariskv_cache_read(NULL, 0, sequence, 0, &k, &v, NULL));
  WRONG("[read] k", pariskv_cache_read(cache, 0, sequence, 0, NULL, &v, NULL));
  WRONG("[read] v", pariskv_cache_read(cache, 0, sequence, 0, &k, NULL, NULL));
  WRONG(no_cache, pariskv_cache_save(NULL, sequence, "/tmp/x"));
  WRONG("[save] path", pariskv_cache_save(cache, sequence, NULL));
  WRONG(no_cache, pariskv_cache_load(NULL, "/tmp/x", NULL, &number));
  WRONG("[load] path", pariskv_cache_load(cache, NULL, NULL, &number));
  WRONG("[load] sequence", pariskv_cache_load(cache, "/tmp/x", NULL, NULL));
  WRONG(no_cache, pariskv_cache_length(NULL, sequence, 0, &number));
  WRONG("[length] tokens", pariskv_cache_length(cache, sequence, 0, NULL));
  WRONG(no_cache, pariskv_cache_regions(NULL, sequence, 0, &counts));
  WRONG("[regions] counts", pariskv_cache_regions(cache, sequence, 0, NULL));
  WRONG(no_cache, pariskv_cache_sequences(NULL, &number, 1, &number));
  WRONG("[sequences] count", pariskv_cache_sequences(cache, &number, 1, NULL));
  WRONG("[sequences] sequences", pariskv_cache_sequences(cache, NULL, 1, &number));
  WRONG("[sequences] capacity", pariskv_cache_sequences(cache, &number, -1, &number));
  WRONG(no_cache, pariskv_cache_stats(NULL, &stats));
  WRONG("[stats] stats", pariskv_cache_stats(cache, NULL));
  WRONG(no_cache, pariskv_cache_pages(NULL, &pages));
  WRONG("[pages] pages", pariskv_cache_pages(cache, NULL));
  WRONG(no_cache, pariskv_cache_page_table(NULL, 1, 1, &table, NULL));
  WRONG("[page_table] table", pariskv_cache_page_table(cache, 1, 1, NULL, NULL));
  WRONG(no_cache, pariskv_cache_trim(NULL));
  WRONG(no_cache, pariskv_cache_config(NULL, &config));
  WRONG("[cache_config] config", pariskv_cache_config(cache, NULL));
}

static void check_tensors(pariskv_cache* cache, pariskv_batch* batch) {
  float rows[2 * kOut], result[kOut];
  pariskv_tensor q = rows_of(rows, 1, kQueryHeads), out = rows_of(result, 1, kQueryHeads);
  pariskv_tensor k = rows_of(rows, 1, kKvHeads), v = k;
#define FIELD(field, value, words)                                                     \
  do {                                                                                 \
    const pariskv_tensor whole = q;                                                    \
    q.field = value;                                                                   \
    WRONG(words, pariskv_cache_decode(cache, 0, batch, &q, &k, &v, &out, NULL, NULL)); \
    q = whole;                                                                         \
  } while (0)
  FIELD(dtype, 3, "[decode] q.dtype");
  FIELD(dtype, PARISKV_FLOAT16, "float16");
  FIELD(device, 2, "[decode] q.device");
  FIELD(device, PARISKV_CUDA, "cuda:0");
  FIELD(rank, 5, "[decode] q.rank");
  FIELD(rank, -1, "[decode] q.rank");
  FIELD(rank, 2, "[decode] q: expected (1, 4, 64) float32 on cpu, got (1, 4) float32 on cpu");
  FIELD(shape[1], -4, "[decode] q.shape[1]");
  FIELD(shape[0], INT64_MAX, "[decode] q.shape[0]");
  FIELD(strides[1], INT64_MIN, "[decode] q.strides[1]");
  FIELD(strides[2], 2, "last stride 1");
  FIELD(data, NULL, "[decode] q: expected data, got a null pointer");
  FIELD(data, (char*)rows + 1, "aligned");
#undef FIELD
  out.data = rows; /* where q lies is fine, where k lies is not */
  k.data = rows + kDim;
  WRONG("memory of its own", pariskv_cache_decode(cache, 0, batch, &q, &k, &v, &out, NULL, NULL));
  const int64_t shape[3] = {1, kQueryHeads, kDim}, endless[2] = {1 << 30, (int64_t)1 << 39};
  pariskv_tensor made;
  WRONG("[tensor_init] tensor",
        pariskv_tensor_init(NULL, sizeof made, rows, PARISKV_FLOAT32, 3, shape));
  WRONG("[tensor_init] tensor.dtype", pariskv_tensor_init(&made, sizeof made, rows, 9, 3, shape));
  WRONG("[tensor_init] tensor.rank",
        pariskv_tensor_init(&made, sizeof made, rows, PARISKV_FLOAT32, 5, shape));
  WRONG("[tensor_init] shape",
        pariskv_tensor_init(&made, sizeof made, rows, PARISKV_FLOAT32, 3, NULL));
  WRONG("[tensor_init] shape",
        pariskv_tensor_init(&made, sizeof made, rows, PARISKV_FLOAT32, 2, endless));
}

static void never_called(void* context) {
  (void)context;
  abort();
}

void test_wrong_input(void) {
  check_config();
  pariskv_config config;
  pariskv_policy_pariskv policy;
  small_config(&config, &policy);
  pariskv_cache *cache = NULL, *other = NULL;
  OK(pariskv_cache_create(&config, NULL, &cache));
  OK(pariskv_cache_create(&config, NULL, &other));
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  OK(add_prompt(cache, sequence, 100, 1));
  pariskv_batch* batch = NULL;
  OK(pariskv_batch_create(cache, &sequence, 1, &batch));
  pariskv_stats before = {.size = sizeof before}, after = {.size = sizeof after};
  OK(pariskv_cache_stats(cache, &before));
  check_nulls(cache, sequence, batch);
  check_tensors(cache, batch);
  float out[kOut];
  WRONG("one of another", decode_token(other, batch, 1, 1, out));
  const pariskv_sequence twice[2] = {sequence, sequence};
  pariskv_batch* made = NULL;
  WRONG("[batch]", pariskv_batch_create(cache, twice, 2, &made));
  WRONG("[remove]", pariskv_cache_remove(cache, 77, NULL));
  CHECK(made == NULL);
  OK(pariskv_cache_stats(cache, &after));
  CHECK(memcmp(&before, &after, offsetof(pariskv_stats, mean_error)) == 0);
  pariskv_cache_destroy(cache), pariskv_cache_destroy(other);
  pariskv_batch_destroy(batch); /* after its cache */
  CHECK(strcmp(pariskv_status_name(PARISKV_OK), "ok") == 0);
  for (pariskv_status a = PARISKV_OK; a <= PARISKV_INTERNAL_ERROR; ++a) {
    CHECK(strcmp(pariskv_status_name(a), pariskv_status_name(a + 1)) != 0);
  }
}

/** Every size but the right one is refused, for each struct; nothing beyond a struct is read. */
void test_sizes(void) {
  pariskv_config config;
  pariskv_policy_pariskv policy;
  pariskv_policy_hardkv kept;
  pariskv_policy_prkv paged;
  pariskv_memory memory = {sizeof memory, NULL, NULL, NULL};
  pariskv_executor executor = {sizeof executor, NULL, NULL};
  pariskv_resources resources = {sizeof resources, NULL, NULL, NULL, NULL, NULL, NULL};
  pariskv_cache *cache = NULL, *none = NULL;
  small_config(&config, &policy);
  OK(pariskv_cache_create(&config, NULL, &cache));
  pariskv_policy_hardkv_init(&kept, sizeof kept), pariskv_policy_prkv_init(&paged, sizeof paged);
  pariskv_borrowed_rows rows_kept;
  pariskv_borrowed_rows_init(&rows_kept, sizeof rows_kept);
  pariskv_sequence sequence = -1;
  OK(pariskv_cache_add(cache, &sequence));
  pariskv_batch* batch = NULL;
  OK(pariskv_batch_create(cache, &sequence, 1, &batch));
  float rows[kOut];
  const int64_t one = 1, shape[3] = {1, kKvHeads, kDim};
  pariskv_tensor k = rows_of(rows, 1, kKvHeads), q = rows_of(rows, 1, kQueryHeads);
  pariskv_attend_options asked = {sizeof asked, 0, 0, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL};
  pariskv_prefill_options with = {sizeof with, NULL, 0, 0, NULL, NULL};
  pariskv_stats stats = {.size = sizeof stats};
  pariskv_region_counts counts = {sizeof counts, 0, 0, 0, 0, 0};
  pariskv_pages pages = {.size = sizeof pages};
  pariskv_page_table table = {.size = sizeof table};
  for (size_t size = 0; size < 400; ++size) {
#define SIZE(type, set, call)                   \
  do {                                          \
    if (size == sizeof(type)) break;            \
    set = size;                                 \
    WRONG("size", call);                        \
    CHECK(strstr(pariskv_last_error(), #type)); \
    set = sizeof(type);                         \
  } while (0)
    size_t given = 0;
    SIZE(pariskv_config, config.size, pariskv_config_validate(&config));
    SIZE(pariskv_config, config.size, pariskv_cache_config(cache, &config));
    SIZE(pariskv_config, given, pariskv_config_init(&config, given));
    SIZE(pariskv_policy_pariskv, policy.size, pariskv_config_validate(&config));
    SIZE(pariskv_policy_pariskv, given, pariskv_policy_pariskv_init(&policy, given));
    config.borrowed = &rows_kept;
    SIZE(pariskv_borrowed_rows, rows_kept.size, pariskv_config_validate(&config));
    SIZE(pariskv_borrowed_rows, given, pariskv_borrowed_rows_init(&rows_kept, given));
    config.borrowed = NULL;
    config.pariskv = NULL, config.hardkv = &kept;
    SIZE(pariskv_policy_hardkv, kept.size, pariskv_config_validate(&config));
    SIZE(pariskv_policy_hardkv, given, pariskv_policy_hardkv_init(&kept, given));
    config.hardkv = NULL, config.prkv = &paged;
    SIZE(pariskv_policy_prkv, paged.size, pariskv_config_validate(&config));
    SIZE(pariskv_policy_prkv, given, pariskv_policy_prkv_init(&paged, given));
    config.prkv = NULL, config.pariskv = &policy;
    SIZE(pariskv_resources, resources.size, pariskv_cache_create(&config, &resources, &none));
    resources.host = &memory;
    SIZE(pariskv_memory, memory.size, pariskv_cache_create(&config, &resources, &none));
    resources.host = NULL, resources.executor = &executor;
    SIZE(pariskv_executor, executor.size, pariskv_cache_create(&config, &resources, &none));
    resources.executor = NULL;
    SIZE(pariskv_tensor, k.size, pariskv_cache_prefill(cache, 0, batch, &one, &k, &k, NULL, NULL));
    SIZE(pariskv_tensor, given, pariskv_tensor_init(&k, given, rows, PARISKV_FLOAT32, 3, shape));
    const int whole = size % sizeof(void*) == 0; /* some are those of earlier versions */
    if (!whole || size < 32 || size > sizeof with) {
      SIZE(pariskv_prefill_options, with.size,
           pariskv_cache_prefill(cache, 0, batch, &one, &k, &k, &with, NULL));
    }
    if (!whole || size < 48 || size > sizeof asked) {
      SIZE(pariskv_attend_options, asked.size,
           pariskv_cache_decode(cache, 0, batch, &q, NULL, NULL, &q, &asked, NULL));
    }
    SIZE(pariskv_stats, stats.size, pariskv_cache_stats(cache, &stats));
    SIZE(pariskv_region_counts, counts.size, pariskv_cache_regions(cache, sequence, 0, &counts));
    SIZE(pariskv_pages, pages.size, pariskv_cache_pages(cache, &pages));
    SIZE(pariskv_page_table, table.size, pariskv_cache_page_table(cache, 1, 1, &table, NULL));
#undef SIZE
  }
  WRONG("[pages] expected a cache on a GPU", pariskv_cache_pages(cache, &pages));
  WRONG("[page_table] expected a cache on a GPU",
        pariskv_cache_page_table(cache, 1, 1, &table, NULL));
  const int64_t page_row = 0;
  with.page_rows = &page_row;
  WRONG("[prefill] page_rows: expected a cache that has a page table",
        pariskv_cache_prefill(cache, 0, batch, &one, &k, &k, &with, NULL));
  OK(pariskv_cache_prefill(cache, 0, batch, &one, &k, &k, NULL, NULL));
  asked.precision = 2;
  WRONG("[attend] options.precision: expected one of 0 (exact), 1 (fast), got 2",
        pariskv_cache_attend(cache, 0, batch, &one, &q, NULL, NULL, &q, &asked, NULL));
  asked.precision = PARISKV_PRECISION_FAST;
  WRONG("[decode] precision: expected exact",
        pariskv_cache_decode(cache, 0, batch, &q, NULL, NULL, &q, &asked, NULL));
  asked.precision = PARISKV_PRECISION_EXACT, asked.dense = never_called;
  WRONG("[decode] dense: expected a cache that has a page table",
        pariskv_cache_decode(cache, 0, batch, &q, NULL, NULL, &q, &asked, NULL));
  asked.dense = NULL, asked.reserved = 1;
  WRONG("[attend] options.reserved: expected 0, got 1",
        pariskv_cache_attend(cache, 0, batch, &one, &q, NULL, NULL, &q, &asked, NULL));
  WRONG("compiled with newer headers", pariskv_config_init(&config, sizeof config + 8));
  CHECK(none == NULL);
  pariskv_batch_destroy(batch);
  pariskv_cache_destroy(cache);
}
