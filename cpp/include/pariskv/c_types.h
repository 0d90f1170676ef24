/**
 * The structs and enumerations of c.h. Each struct begins with its `size`; no struct has padding,
 * so that a new field always makes it longer.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What became of a call. */
enum pariskv_status_code {
  PARISKV_OK = 0,
  PARISKV_INVALID_ARGUMENT = 1, /**< The caller's mistake. */
  PARISKV_OUT_OF_MEMORY = 2,    /**< A budget, the program's memory or the system's refused. */
  PARISKV_CUDA_ERROR = 3,       /**< Most often the device is lost to the process. */
  PARISKV_FILE_ERROR = 4,       /**< pariskv_last_errno() says why. */
  PARISKV_STOPPED = 5,          /**< pariskv_resources::should_stop answered so. */
  PARISKV_INTERNAL_ERROR = 6    /**< A bug of the library: please report it. */
};
typedef int32_t pariskv_status; /**< One of pariskv_status_code. */

enum pariskv_dtype { PARISKV_FLOAT32 = 0, PARISKV_FLOAT16 = 1, PARISKV_BFLOAT16 = 2 };

enum pariskv_device { PARISKV_CPU = 0, PARISKV_CUDA = 1 };

/** How rows of retrieval zones are stored: KVDType of config.h. */
enum pariskv_kv_dtype { PARISKV_KV_AUTO = 0, PARISKV_KV_INT8 = 1 };

/** Where a cache on a GPU keeps rows of retrieval zones: Placement of config.h. */
enum pariskv_placement { PARISKV_PLACE_AUTO = 0, PARISKV_PLACE_HOST = 1, PARISKV_PLACE_DEVICE = 2 };

/** How numbers of borrowed rows are written: BorrowedType of borrowed.h. */
enum pariskv_borrowed_type {
  PARISKV_BORROWED_FLOAT32 = 0,
  PARISKV_BORROWED_FLOAT16 = 1,
  PARISKV_BORROWED_BFLOAT16 = 2,
  PARISKV_BORROWED_Q8_0 = 3
};

/** Scorer of policies.h. */
enum pariskv_scorer { PARISKV_SCORER_SIGN_NORM = 0, PARISKV_SCORER_VOTES = 1 };

/** GroupRule of policies.h. */
enum pariskv_group_rule { PARISKV_GROUP_ATTENTION_MASS = 0, PARISKV_GROUP_MEAN_QUERY = 1 };

/** TailRule of policies.h. */
enum pariskv_tail { PARISKV_TAIL_OWN = 0, PARISKV_TAIL_NONE = 1, PARISKV_TAIL_SAMPLE = 2 };

/** KeepMetric of policies.h. */
enum pariskv_keep_metric { PARISKV_KEEP_ATTENTION = 0, PARISKV_KEEP_SNAPKV = 1 };

/** ZoneRows of policies.h. */
enum pariskv_zone_rows { PARISKV_ROWS_HOST = 0, PARISKV_ROWS_DROPPED = 1 };

/** PageDigest of policies.h. */
enum pariskv_page_digest { PARISKV_DIGEST_MEAN = 0, PARISKV_DIGEST_MAX = 1 };

/** How pariskv_cache_truncate counts: the last tokens go, or the first ones stay. */
enum pariskv_cut { PARISKV_DROP = 0, PARISKV_KEEP = 1 };

/** A cache: all layers and sequences of one model on one device. */
typedef struct pariskv_cache pariskv_cache;

/** Sequences that calls work on, looked up once. */
typedef struct pariskv_batch pariskv_batch;

/** A sequence's name; never used twice in the life of a cache. */
typedef int64_t pariskv_sequence;

/** A window on memory of the program; it must stay as it is until the call's work is done. */
typedef struct pariskv_tensor {
  size_t size;
  void* data;           /**< Where inputs and outputs begin; inputs are only read. */
  int32_t dtype;        /**< One of pariskv_dtype. */
  int32_t device;       /**< One of pariskv_device. */
  int32_t device_index; /**< Of the GPU. */
  int32_t rank;         /**< Dimensions, at most 4. */
  int64_t shape[4];
  int64_t strides[4]; /**< In elements; the last one of them is 1. */
} pariskv_tensor;

/** One row of a schedule: from so many tokens in the zone on, these shares hold. */
typedef struct pariskv_schedule_step {
  int64_t from_tokens;
  double candidate_ratio;
  double vote_ratio;
} pariskv_schedule_step;

/** Settings of the policy ParisKV, see policies.h. */
typedef struct pariskv_policy_pariskv {
  size_t size;
  int64_t top_k;
  int32_t scorer;     /**< One of pariskv_scorer. */
  int32_t group_rule; /**< One of pariskv_group_rule. */
  const pariskv_schedule_step* schedule;
  int64_t schedule_steps; /**< 0: the policy's own schedule. */
  int64_t min_candidates_per_row;
  uint64_t seed; /**< Where secret_seed is 1 it is not read. */
  int64_t block;
  int64_t tail_rows;
  double error;        /**< 0: none, always top_k rows. */
  int32_t tail;        /**< One of pariskv_tail. */
  int32_t secret_seed; /**< 1: each sequence's tail is drawn by a secret of its own. */
} pariskv_policy_pariskv;

/** Settings of the policy HardKV, see policies.h. */
typedef struct pariskv_policy_hardkv {
  size_t size;
  int64_t most;
  double p;
  int64_t least;
  int32_t metric;    /**< One of pariskv_keep_metric. */
  int32_t placement; /**< One of pariskv_zone_rows. */
  int64_t pool;
  int64_t patience;
} pariskv_policy_hardkv;

/** Settings of the policy PRKV, see policies.h. */
typedef struct pariskv_policy_prkv {
  size_t size;
  int64_t budget;
  double static_share; /**< -1: as far as the first and the last query of a prompt agree. */
  int64_t page;
  int32_t digest;   /**< One of pariskv_page_digest. */
  int32_t reserved; /**< 0. */
} pariskv_policy_prkv;

/** Rows that the program keeps and the cache reads in place, see borrowed.h. */
typedef struct pariskv_borrowed_rows {
  size_t size;
  int32_t key;               /**< One of pariskv_borrowed_type. */
  int32_t value;             /**< The same. */
  int64_t key_head_stride;   /**< In bytes; 0: heads without a gap. */
  int64_t value_head_stride; /**< The same. */
} pariskv_borrowed_rows;

/** Of pariskv_config.dense_below: a GPU decides by the batch of each step. */
enum pariskv_dense_below { PARISKV_DENSE_BY_BATCH = -2 };

/** What a cache is told when it is made, see config.h. */
typedef struct pariskv_config {
  size_t size;
  int64_t layers;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t value_dim; /**< 0: head_dim. */
  int32_t dtype;     /**< One of pariskv_dtype. */
  int32_t kv_dtype;  /**< One of pariskv_kv_dtype. */
  int64_t sink;      /**< These four: -1 is the policy's own size. */
  int64_t local;
  int64_t update;
  int64_t dense_below;                   /**< Or PARISKV_DENSE_BY_BATCH: see config.h. */
  const pariskv_policy_pariskv* pariskv; /**< At most one of these three; none: ParisKV. */
  const pariskv_policy_hardkv* hardkv;
  const pariskv_policy_prkv* prkv;
  int32_t device;       /**< One of pariskv_device. */
  int32_t device_index; /**< Of the GPU. */
  int64_t threads;      /**< 0: one per core. */
  int64_t segment_tokens;
  int64_t memory_budget;                 /**< In bytes; 0: no limit. */
  int64_t host_budget;                   /**< In bytes; 0: no limit. */
  int64_t row_cache;                     /**< -1: twice the rows that a step selects. */
  int32_t placement;                     /**< One of pariskv_placement. */
  int32_t reserved;                      /**< 0. */
  const pariskv_borrowed_rows* borrowed; /**< Null: the cache copies rows. */
} pariskv_config;

/** More than 0 bytes at a multiple of `alignment`, a power of two; null: there are none. */
typedef void* (*pariskv_allocate)(void* user, size_t bytes, size_t alignment);

/** Takes a block back, with the bytes and the alignment that it was asked for with. */
typedef void (*pariskv_deallocate)(void* user, void* data, size_t bytes, size_t alignment);

/** Memory of the program, in place of the library's own: MemoryResource of memory.h. */
typedef struct pariskv_memory {
  size_t size;
  void* user; /**< Handed to both functions. */
  pariskv_allocate allocate;
  pariskv_deallocate deallocate;
} pariskv_memory;

/** A share of the work under way; see Task of executor.h. */
typedef void (*pariskv_task)(void* context);

/** Calls task(context) so many times, on any threads, and returns when these have returned. */
typedef void (*pariskv_run)(void* user, int64_t times, pariskv_task task, void* context);

/** Threads of the program, in place of the cache's own: Executor of executor.h. */
typedef struct pariskv_executor {
  size_t size;
  void* user; /**< Handed to the function. */
  pariskv_run run;
} pariskv_executor;

/** Asked often in long calls, on their thread: 0 is go on. See Resources::should_stop. */
typedef int32_t (*pariskv_should_stop)(void* user);

/** What a program lends a cache; null: the library's own. `user` must outlive the cache. */
typedef struct pariskv_resources {
  size_t size;
  const pariskv_memory* host;       /**< Memory of a cache on the CPU. */
  const pariskv_memory* device;     /**< Memory of the GPU. */
  const pariskv_memory* pinned;     /**< Host memory that the GPU can read. */
  const pariskv_executor* executor; /**< Threads of a cache on the CPU. */
  pariskv_should_stop should_stop;
  void* stop_user; /**< Handed to should_stop. */
} pariskv_resources;

/** How exactly an attend adds values up: Precision of cache.h. */
enum pariskv_precision { PARISKV_PRECISION_EXACT = 0, PARISKV_PRECISION_FAST = 1 };

/** Attention to pages that a decode leaves to its caller, with the caller's own context. */
typedef void (*pariskv_dense)(void* dense_context);

/** How logits become attention: AttendOptions of cache.h. */
typedef struct pariskv_attend_options {
  size_t size;
  double scale;                    /**< 0: 1 / sqrt(head_dim). */
  double softcap;                  /**< 0: none. */
  const pariskv_tensor* sink_bias; /**< (query_heads) float32, or null. */
  const pariskv_tensor* lse;       /**< (tokens, query_heads) float32, written, or null. */
  const pariskv_tensor* error;     /**< (batch, kv_heads) float32, written, or null. */
  int32_t precision;               /**< One of pariskv_precision; other calls than attend: 0. */
  int32_t reserved;                /**< 0. */
  /**
   * Null, or of a decode with a page table: attends to pages in place of the call, see
   * AttendOptions::dense. It is called once, on the thread of the call, and must not call the
   * cache.
   */
  pariskv_dense dense;
  void* dense_context;
  const int64_t* page_rows; /**< (batch) with dense: rows of the page table; null: in order. */
} pariskv_attend_options;

/** What a prompt may bring besides its keys and values: PrefillOptions of cache.h. */
typedef struct pariskv_prefill_options {
  size_t size;
  const pariskv_tensor* q;  /**< (sum of lengths, query_heads, head_dim), or null. */
  double scale;             /**< 0: 1 / sqrt(head_dim). */
  double softcap;           /**< 0: none. */
  const int64_t* page_rows; /**< (batch) rows of the page table that are filled, or null. */
  int32_t* unserved;        /**< With page_rows: (batch), written: 1 where pages do not serve a
                                 sequence, else 0; or null. */
} pariskv_prefill_options;

/** Plain rows of a cache on a GPU as pages: Pages of pages.h. */
typedef struct pariskv_pages {
  size_t size;
  pariskv_tensor keys;   /**< (pages, tokens, kv_heads, head_dim) */
  pariskv_tensor values; /**< (pages, tokens, kv_heads, value_dim) */
} pariskv_pages;

/** Which pages the sequences of a step have, in the device's memory: PageTable of pages.h. */
typedef struct pariskv_page_table {
  size_t size;
  int32_t* pages;   /**< (rows, width) numbers of pages. */
  int32_t* lengths; /**< (rows) tokens; 0: pages do not serve the sequence. */
  int64_t rows;
  int64_t width;
} pariskv_page_table;

/** In place of a sequence: a slot of decode and advance whose output is zeros, see kIdle. */
enum pariskv_idle { PARISKV_IDLE = -0x49444C45 };

/** Of a cache's device, and of host memory beside a GPU. */
typedef struct pariskv_bytes {
  size_t size;
  int64_t device;
  int64_t host;
} pariskv_bytes;

/** Tokens of one layer of a sequence, by region: RegionCounts of stats.h. */
typedef struct pariskv_region_counts {
  size_t size;
  int64_t sink;
  int64_t retrieval;
  int64_t local;
  int64_t buffer;
  int64_t dropped;
} pariskv_region_counts;

/** Contents and counters of a cache: Stats of stats.h. Bytes of memory come first. */
typedef struct pariskv_stats {
  size_t size;
  int64_t memory_live;
  int64_t memory_peak;
  int64_t memory_reserved;
  int64_t memory_budget;
  int64_t host_live; /**< Host memory of a cache on a GPU: these four. */
  int64_t host_peak;
  int64_t host_reserved;
  int64_t host_budget;
  int64_t sequences;
  int64_t tokens;
  int64_t row_bytes;
  int64_t offloaded_bytes;
  int64_t summary_bytes;
  int64_t workspace_bytes;
  int64_t flushes;
  int64_t encoded_keys;
  int64_t kept_rows;
  int64_t kept_bytes;
  int64_t keeps;
  int64_t dropped_rows;
  int64_t unusable_keys;
  int64_t decode_tokens;
  int64_t searched_tokens;
  int64_t candidates;
  int64_t fetched_rows;
  int64_t cached_rows;
  double mean_error;
  double worst_error;
  double mean_mass;
  double least_mass;
} pariskv_stats;

/**
 * Why a query attends where it does: Explanation of stats.h, with the struct of the cache's policy.
 * The library makes it, and its arrays live as long. An array that is empty is null.
 */
typedef struct pariskv_explanation {
  size_t size;
  int64_t kv_heads;
  int64_t query_heads;
  int64_t zone_begin;
  int64_t zone_tokens;
  int64_t selected;         /**< Width of positions. */
  int64_t searched;         /**< 1, or 0: nothing was selected for this query. */
  const int64_t* positions; /**< (kv_heads, selected) */
  const float* worth;       /**< (kv_heads, selected) */
  const float* exact;       /**< (query_heads, selected) */
  int64_t kept_width;
  const int64_t* kept; /**< (kv_heads, kept_width), HardKV and PRKV. */
  int64_t candidates;
  const int64_t* candidate_positions; /**< (kv_heads, candidates), ParisKV. */
  const uint8_t* coarse;              /**< (kv_heads, zone_tokens), ParisKV. */
  const float* estimated;             /**< (query_heads, selected), ParisKV. */
  const float* error;                 /**< (kv_heads), ParisKV. */
  const float* mass;                  /**< (kv_heads), ParisKV. */
  int64_t held_width;
  const int64_t* held; /**< (kv_heads, held_width), HardKV. */
  int64_t static_rows; /**< PRKV. */
  int64_t first_page;  /**< PRKV. */
  int64_t zone_pages;
  const float* page_scores; /**< (kv_heads, zone_pages), PRKV. */
  int64_t pages_width;
  const int64_t* pages; /**< (kv_heads, pages_width), PRKV. */
} pariskv_explanation;

/**
 * The key summaries of one layer of one sequence, unpacked: Summaries of stats.h. The library makes
 * it, and its arrays live as long. An array that is empty is null.
 */
typedef struct pariskv_summaries {
  size_t size;
  int64_t kv_heads;
  int64_t tokens;
  int64_t zone_begin;
  int64_t rotated_dim;
  int64_t subspaces;
  const uint8_t* signs;      /**< (kv_heads, tokens, subspaces) */
  const uint8_t* magnitudes; /**< (kv_heads, tokens, rotated_dim) */
  const float* weights;      /**< (kv_heads, tokens, subspaces) */
  const float* norms;        /**< (kv_heads, tokens) */
  int64_t block;
  int64_t blocks;
  int64_t channels;
  const float* means;   /**< (kv_heads, blocks, channels) */
  const float* balance; /**< (kv_heads, channels) */
  int64_t page;
  int64_t pages;
  const float* middles;   /**< (kv_heads, pages, channels) */
  const float* distances; /**< (kv_heads, pages, channels) */
} pariskv_summaries;

#ifdef __cplusplus
}
#endif
