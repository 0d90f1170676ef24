/**
 * The library for C, and for every language that calls C:
 *
 *   pariskv_config config;
 *   pariskv_config_init(&config, sizeof config);
 *   config.layers = 32, config.query_heads = 32, config.kv_heads = 8, config.head_dim = 128;
 *   pariskv_cache* cache;
 *   if (pariskv_cache_create(&config, NULL, &cache) != PARISKV_OK) puts(pariskv_last_error());
 *
 * Calls, shapes and limits are those of cache.h. These hold for every call:
 *
 * - It returns a status. Anything but PARISKV_OK left the cache and the results as they were, and
 *   pariskv_last_error() is a sentence about it. Arrays of an output tensor may hold a part of it.
 * - A struct begins with its `size`, which says how new the program's header is: `sizeof` of the
 *   struct, from its init call or an initialiser `{.size = sizeof options}`. Later versions add
 * fields in the end and take older sizes. Structs and arrays are read during the call alone.
 * - Enumerations are passed as int32_t.
 * - `stream` is the cudaStream_t that a call joins on a GPU, null for CUDA's default one. On the
 *   CPU it is not looked at.
 *
 * Calls on one cache may come from several threads and take turns. A null pointer is refused, a
 * handle that was destroyed is not noticed. Functions that the program lends are called from inside
 * its calls, also on other threads; they must neither throw nor call the cache.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "pariskv/c_types.h"
#include "pariskv/export.h"
#include "pariskv/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** "0.1.0", say: of the library that is loaded. PARISKV_VERSION_STRING is that of the headers. */
PARISKV_API const char* pariskv_version(void);

/**
 * A sentence about the last call of this thread that failed; empty when none did. It stays as it is
 * until another one fails on this thread.
 */
PARISKV_API const char* pariskv_last_error(void);

/** The system's errno of the last PARISKV_FILE_ERROR on this thread; 0 when there was none. */
PARISKV_API int32_t pariskv_last_errno(void);

/** "invalid argument" and the like. */
PARISKV_API const char* pariskv_status_name(pariskv_status status);

/** The instruction set that the CPU backend runs on: "plain", "avx2" or "avx512". */
PARISKV_API const char* pariskv_cpu_level(void);

/** 1 when this build has a backend for the device, else 0. @param device of pariskv_device */
PARISKV_API int32_t pariskv_is_built(int32_t device);

/** 1 when it has, and such a device is there. */
PARISKV_API int32_t pariskv_is_available(int32_t device);

/** Fills in the defaults. @param size sizeof *config, as in the calls below */
PARISKV_API pariskv_status pariskv_config_init(pariskv_config* config, size_t size);
PARISKV_API pariskv_status pariskv_borrowed_rows_init(pariskv_borrowed_rows* rows, size_t size);
PARISKV_API pariskv_status pariskv_policy_pariskv_init(pariskv_policy_pariskv* policy, size_t size);
PARISKV_API pariskv_status pariskv_policy_hardkv_init(pariskv_policy_hardkv* policy, size_t size);
PARISKV_API pariskv_status pariskv_policy_prkv_init(pariskv_policy_prkv* policy, size_t size);

/** Says what does not fit; a cache is refused for the same. */
PARISKV_API pariskv_status pariskv_config_validate(const pariskv_config* config);

/**
 * What sequences take at most, see Config::bytes_per_token: so much for each token, and so much for
 * each sequence beside.
 * @param most_tokens  of a sequence
 * @param bytes        written, its `size` set before
 */
PARISKV_API pariskv_status pariskv_config_bytes_per_token(const pariskv_config* config,
                                                          int64_t most_tokens,
                                                          pariskv_bytes* bytes);
/** @param multiple  each length is counted as the next multiple of it */
PARISKV_API pariskv_status pariskv_config_bytes_per_sequence(const pariskv_config* config,
                                                             int64_t most_tokens, int64_t multiple,
                                                             pariskv_bytes* bytes);

/** A row-major tensor in host memory; for one on a GPU set `device` and `device_index` then. */
PARISKV_API pariskv_status pariskv_tensor_init(pariskv_tensor* tensor, size_t size, void* data,
                                               int32_t dtype, int32_t rank, const int64_t* shape);

/** @param resources null: memory and threads of the library's own */
PARISKV_API pariskv_status pariskv_cache_create(const pariskv_config* config,
                                                const pariskv_resources* resources,
                                                pariskv_cache** cache);

/** Ends a cache; no call on it may be under way. Null is fine. */
PARISKV_API void pariskv_cache_destroy(pariskv_cache* cache);

/**
 * The config with numbers for all that was left to the policy.
 * @param config written, its `size` set before; the policy's settings are the cache's own memory
 */
PARISKV_API pariskv_status pariskv_cache_config(const pariskv_cache* cache, pariskv_config* config);

/** A new, empty sequence. */
PARISKV_API pariskv_status pariskv_cache_add(pariskv_cache* cache, pariskv_sequence* sequence);

/** Forgets a sequence: its bytes are zeroed and given back. */
PARISKV_API pariskv_status pariskv_cache_remove(pariskv_cache* cache, pariskv_sequence sequence,
                                                void* stream);

/** A new sequence equal to this one. Storage is shared until either changes. */
PARISKV_API pariskv_status pariskv_cache_fork(pariskv_cache* cache, pariskv_sequence sequence,
                                              void* stream, pariskv_sequence* forked);

/** The same with the first tokens alone. @param tokens 1 or more, at most the shortest layer's */
PARISKV_API pariskv_status pariskv_cache_fork_prefix(pariskv_cache* cache,
                                                     pariskv_sequence sequence, int64_t tokens,
                                                     void* stream, pariskv_sequence* forked);

/**
 * Looks sequences up, so that calls need not: make one batch for many steps. It stays good while
 * its sequences grow and while other sequences come and go; calls refuse it once one of its own is
 * removed, and in another cache.
 * @param sequences  `count` of them, each once
 */
PARISKV_API pariskv_status pariskv_batch_create(const pariskv_cache* cache,
                                                const pariskv_sequence* sequences, int64_t count,
                                                pariskv_batch** batch);

/** May come after the end of its cache. Null is fine. */
PARISKV_API void pariskv_batch_destroy(pariskv_batch* batch);

/** Beam reordering: sequence i then holds the rows of sequence source[i], one for each. */
PARISKV_API pariskv_status pariskv_cache_reorder(pariskv_cache* cache, const pariskv_batch* batch,
                                                 const int64_t* source, void* stream);

/** Shortens each sequence, in every layer. @param cut one of pariskv_cut: how `tokens` counts */
PARISKV_API pariskv_status pariskv_cache_truncate(pariskv_cache* cache, const pariskv_batch* batch,
                                                  int32_t cut, const int64_t* tokens, void* stream);

/**
 * Appends a prompt, or a chunk of one, and attends to nothing.
 * @param lengths  tokens of each sequence of the batch
 * @param k        (sum of lengths, kv_heads, head_dim), after RoPE, in the config's dtype
 * @param v        (sum of lengths, kv_heads, value_dim)
 * @param options  may be null
 */
PARISKV_API pariskv_status pariskv_cache_prefill(pariskv_cache* cache, int64_t layer,
                                                 const pariskv_batch* batch, const int64_t* lengths,
                                                 const pariskv_tensor* k, const pariskv_tensor* v,
                                                 const pariskv_prefill_options* options,
                                                 void* stream);

/**
 * Appends a token to each sequence, then attends to the rows that matter.
 * @param q        (batch, query_heads, head_dim), after RoPE
 * @param k        (batch, kv_heads, head_dim); null with v: appends nothing and changes nothing
 * @param v        (batch, kv_heads, value_dim)
 * @param out      (batch, query_heads, value_dim), written
 * @param options  may be null
 */
PARISKV_API pariskv_status pariskv_cache_decode(pariskv_cache* cache, int64_t layer,
                                                const pariskv_batch* batch, const pariskv_tensor* q,
                                                const pariskv_tensor* k, const pariskv_tensor* v,
                                                const pariskv_tensor* out,
                                                const pariskv_attend_options* options,
                                                void* stream);

/** Before each replay of a CUDA graph of decodes, see Cache::advance. */
PARISKV_API pariskv_status pariskv_cache_advance(pariskv_cache* cache, const pariskv_batch* batch,
                                                 void* stream);

/**
 * Appends tokens and attends from each of them, exactly and causally: a turn, a chunk, a draft.
 * @param lengths  queries of each sequence of the batch
 * @param q        (sum of lengths, query_heads, head_dim)
 * @param k        (sum of lengths, kv_heads, head_dim); null with v: the tokens are stored already
 * @param v        (sum of lengths, kv_heads, value_dim)
 * @param out      (sum of lengths, query_heads, value_dim), written
 * @param options  may be null
 */
PARISKV_API pariskv_status pariskv_cache_attend(pariskv_cache* cache, int64_t layer,
                                                const pariskv_batch* batch, const int64_t* lengths,
                                                const pariskv_tensor* q, const pariskv_tensor* k,
                                                const pariskv_tensor* v, const pariskv_tensor* out,
                                                const pariskv_attend_options* options,
                                                void* stream);

/**
 * pariskv_cache_prefill of a cache with borrowed rows (pariskv_config::borrowed), see borrowed.h.
 * @param keys    (sum of lengths) where K of the first kv head lies, packed as tokens are
 * @param values  (sum of lengths) the same of V
 */
PARISKV_API pariskv_status pariskv_cache_prefill_rows(
    pariskv_cache* cache, int64_t layer, const pariskv_batch* batch, const int64_t* lengths,
    const void* const* keys, const void* const* values, const pariskv_prefill_options* options,
    void* stream);

/** The same of pariskv_cache_decode: an address of K and one of V for each sequence. */
PARISKV_API pariskv_status pariskv_cache_decode_rows(
    pariskv_cache* cache, int64_t layer, const pariskv_batch* batch, const pariskv_tensor* q,
    const void* const* keys, const void* const* values, const pariskv_tensor* out,
    const pariskv_attend_options* options, void* stream);

/** The same of pariskv_cache_attend, where it appends. */
PARISKV_API pariskv_status pariskv_cache_attend_rows(
    pariskv_cache* cache, int64_t layer, const pariskv_batch* batch, const int64_t* lengths,
    const pariskv_tensor* q, const void* const* keys, const void* const* values,
    const pariskv_tensor* out, const pariskv_attend_options* options, void* stream);

/**
 * Borrowed rows now lie elsewhere, as the same bytes; a fork has to be told as well.
 * @param begin    first position of each sequence of the batch
 * @param lengths  how many follow, 0 or more
 */
PARISKV_API pariskv_status pariskv_cache_move_rows(pariskv_cache* cache, int64_t layer,
                                                   const pariskv_batch* batch, const int64_t* begin,
                                                   const int64_t* lengths, const void* const* keys,
                                                   const void* const* values, void* stream);

/** Borrowed rows have other numbers now, where they lie: makes the summaries of their keys anew. */
PARISKV_API pariskv_status pariskv_cache_rewrite_rows(pariskv_cache* cache, int64_t layer,
                                                      const pariskv_batch* batch, void* stream);

/** Moves everything older than the local window to the retrieval zone, in every layer. */
PARISKV_API pariskv_status pariskv_cache_flush(pariskv_cache* cache, const pariskv_batch* batch,
                                               void* stream);

/** The same for every sequence. */
PARISKV_API pariskv_status pariskv_cache_flush_all(pariskv_cache* cache, void* stream);

/**
 * Which rows decode would choose for a query now, and why. Changes nothing.
 * @param q            (query_heads, head_dim)
 * @param options      may be null
 * @param explanation  written; to be given to pariskv_explanation_destroy
 */
PARISKV_API pariskv_status pariskv_cache_explain(const pariskv_cache* cache, int64_t layer,
                                                 pariskv_sequence sequence, const pariskv_tensor* q,
                                                 const pariskv_attend_options* options,
                                                 void* stream,
                                                 const pariskv_explanation** explanation);

/** Null is fine. */
PARISKV_API void pariskv_explanation_destroy(const pariskv_explanation* explanation);

/**
 * The summaries of a retrieval zone, unpacked.
 * @param summaries  written; to be given to pariskv_summaries_destroy
 */
PARISKV_API pariskv_status pariskv_cache_summaries(const pariskv_cache* cache, int64_t layer,
                                                   pariskv_sequence sequence,
                                                   const pariskv_summaries** summaries);

/** Null is fine. */
PARISKV_API void pariskv_summaries_destroy(const pariskv_summaries* summaries);

/**
 * Copies stored rows out.
 * @param begin  first position; k and v say how many follow
 * @param k      (tokens, kv_heads, head_dim), written
 * @param v      (tokens, kv_heads, value_dim), written
 */
PARISKV_API pariskv_status pariskv_cache_read(const pariskv_cache* cache, int64_t layer,
                                              pariskv_sequence sequence, int64_t begin,
                                              const pariskv_tensor* k, const pariskv_tensor* v,
                                              void* stream);

/** Writes a sequence to a file, which appears whole. @param path in the system's own bytes */
PARISKV_API pariskv_status pariskv_cache_save(const pariskv_cache* cache, pariskv_sequence sequence,
                                              const char* path);

/** A new sequence, equal to the one that was saved. */
PARISKV_API pariskv_status pariskv_cache_load(pariskv_cache* cache, const char* path, void* stream,
                                              pariskv_sequence* sequence);

/** Tokens of a sequence in one layer. */
PARISKV_API pariskv_status pariskv_cache_length(const pariskv_cache* cache,
                                                pariskv_sequence sequence, int64_t layer,
                                                int64_t* tokens);

/** @param counts written, its `size` set before */
PARISKV_API pariskv_status pariskv_cache_regions(const pariskv_cache* cache,
                                                 pariskv_sequence sequence, int64_t layer,
                                                 pariskv_region_counts* counts);

/**
 * The sequences that there are, in the order in which they came.
 * @param sequences  room for `capacity` of them, written; null with a capacity of 0
 * @param count      how many there are: with more than `capacity`, the first ones are written
 */
PARISKV_API pariskv_status pariskv_cache_sequences(const pariskv_cache* cache,
                                                   pariskv_sequence* sequences, int64_t capacity,
                                                   int64_t* count);

/** Takes memory for so many tokens of so many new sequences ahead, see Cache::reserve. */
PARISKV_API pariskv_status pariskv_cache_reserve(pariskv_cache* cache, int64_t tokens,
                                                 int64_t sequences);

/** Takes a GPU's memory for whatever comes, see Cache::reserve_device. */
PARISKV_API pariskv_status pariskv_cache_reserve_device(pariskv_cache* cache, int64_t bytes);

/**
 * Takes host memory for rows that leave a GPU, see Cache::reserve_host.
 * @param background  not 0: a thread takes it meanwhile
 */
PARISKV_API pariskv_status pariskv_cache_reserve_host(pariskv_cache* cache, int64_t bytes,
                                                      int32_t background);

/** @param pages  written, its `size` set before; see Cache::pages */
PARISKV_API pariskv_status pariskv_cache_pages(const pariskv_cache* cache, pariskv_pages* pages);

/** @param table  written, its `size` set before; see Cache::page_table */
PARISKV_API pariskv_status pariskv_cache_page_table(pariskv_cache* cache, int64_t sequences,
                                                    int64_t tokens, pariskv_page_table* table,
                                                    void* stream);

/** @param stats written, its `size` set before */
PARISKV_API pariskv_status pariskv_cache_stats(const pariskv_cache* cache, pariskv_stats* stats);

/** Gives memory that nothing uses back to the device and the system. Waits for the device. */
PARISKV_API pariskv_status pariskv_cache_trim(pariskv_cache* cache);

#ifdef __cplusplus
}
#endif
