/**
 * The cache: all layers and all sequences of one model on one device.
 *
 *   pariskv::Config config;
 *   config.layers = 32, config.query_heads = 32, config.kv_heads = 8, config.head_dim = 128;
 *   pariskv::Cache cache(config);
 *
 *   auto sequence = cache.add();
 *   cache.prefill(layer, {sequence}, {tokens}, k, v);      // the prompt, once per layer
 *   cache.decode(layer, {sequence}, q, k, v, out);         // each new token, once per layer
 *
 * A batch has sequences of any lengths. Several tokens per sequence come
 * packed: sequence after sequence along dimension 0, `lengths` saying how many each
 * has. Results do not depend on the rest of the batch (unless Config::dense_below is
 * kDenseByBatch), nor on the thread count.
 *
 * Calls on one cache take turns; calls on different caches run side by side. After fork(2) the
 * child may go on using a cache on the CPU, on one thread, if no call was inside it; otherwise its
 * calls are refused there. CUDA does not survive a fork.
 *
 * A long call can be stopped, see Resources::should_stop; it then throws Stopped and has changed
 * nothing.
 *
 * On a GPU every call but the ones that return numbers to the host only enqueues work on the
 * stream it is given, and work of later calls, on whatever stream, comes after it. Tensors
 * must stay as they are until it is done. Three calls may wait for the device: `trim`; any that
 * finds no memory left; a prefill while more than 2 GiB of rows are on their way to the host.
 *
 * Outputs have memory of their own; `out` may be exactly `q`.
 *
 * A query head that is not finite searches for nothing: its output is NaN, the other heads' is as
 * it would be without it.
 *
 * Where HardKV::placement has rows dropped, calls that need them throw std::invalid_argument before
 * anything changes: attend, read, truncate, and a prefill without queries.
 *
 * A sequence has at most 8,388,608 tokens; a decode on a GPU at most 4,096 sequences.
 */
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pariskv/borrowed.h"
#include "pariskv/config.h"
#include "pariskv/export.h"
#include "pariskv/memory.h"
#include "pariskv/pages.h"
#include "pariskv/stats.h"
#include "pariskv/stream.h"
#include "pariskv/tensor_view.h"

namespace pariskv {

/** A sequence's name; never used twice in the life of a cache. */
using SequenceId = int64_t;

/**
 * A slot of a batch without a sequence, for `decode` and `advance`: nothing is read or written for
 * it, its output is zeros, its log-sum-exp minus infinity and its error 0. So one graph, recorded
 * over as many slots as it may ever need, serves any sequences in any of them.
 *
 * "IDLE" in ASCII, below zero: no program comes to it by accident, so that an id of -1 that was
 * lost on the way is refused.
 */
constexpr SequenceId kIdle = -0x49444C45;

/**
 * The sequences that a call works on, in order, each once. A list of ids is looked up and checked
 * by every call that it is given to, a batch made by Cache::batch once: for steps of many layers.
 * Such a batch stays good while other sequences come and go; with one of its own removed, and in
 * another cache, calls refuse it.
 */
class Batch {
 public:
  Batch(std::vector<SequenceId> ids) : ids_(std::move(ids)) {}
  Batch(std::initializer_list<SequenceId> ids) : ids_(ids) {}

  const std::vector<SequenceId>& ids() const { return ids_; }
  int64_t size() const { return int64_t(ids_.size()); }

 private:
  friend class Cache;
  struct Prepared;
  std::vector<SequenceId> ids_;
  std::shared_ptr<const Prepared> prepared_;  // null: a list
};

/** How logits become attention. */
struct AttendOptions {
  std::optional<double> scale;  ///< Of q.k; 1 / sqrt(head_dim) when absent.
  double softcap = 0;           ///< c > 0: logits become c * tanh(logit / c).
  std::optional<TensorView>
      sink_bias;                  ///< (query_heads) float32: a logit with no value row; -inf: none.
  std::optional<TensorView> lse;  ///< (tokens, query_heads) float32, written: log-sum-exp.
  /**
   * (batch, kv_heads) float32, written, of a decode: the error that its estimate of the keys that
   * are not selected adds to a head's output, as a share of a value's size; root mean square over
   * the heads of a group. 0 where nothing is estimated, NaN where no query is finite. With ParisKV
   * that has a sample and GroupRule::kAttentionMass; others refuse.
   */
  std::optional<TensorView> error;
  Precision precision = Precision::kExact;  ///< Of an attend; others refuse kFast.
  /**
   * Of a decode with a page table: attends to pages in place of the call, for the sequences whose
   * length in the table is not 0, and is called once the token's rows are there. Then the call
   * attends for the others, which the kernel may have given zeros. It must not call the cache. A
   * decode that is captured calls it too, so that a graph has its work.
   */
  std::function<void()> dense;
  std::vector<int64_t> page_rows;  ///< With `dense`: as in PrefillOptions; a graph has its own.
};

/** How much of each sequence of a batch `truncate` takes away. */
struct Cut {
  enum class Counts { kDropped, kKept };
  Counts counts;
  std::vector<int64_t> tokens;  ///< (batch)

  /** The last tokens go, so many of each sequence. */
  static Cut drop(std::vector<int64_t> tokens) { return {Counts::kDropped, std::move(tokens)}; }

  /** The first tokens stay, so many of each sequence: in every layer, whatever its length. */
  static Cut keep(std::vector<int64_t> tokens) { return {Counts::kKept, std::move(tokens)}; }
};

/** What a prompt may bring besides its keys and values. */
struct PrefillOptions {
  /**
   * (sum of lengths, query_heads, head_dim) its queries, after RoPE, in the config's dtype: a few
   * early ones tell how the channels of keys and queries are balanced (ParisKV::block). Without
   * them keys alone say it, and the rows that are picked are less good. The last ones say what
   * HardKV and PRKV keep; without them they keep nothing until they have decoded for a while.
   */
  std::optional<TensorView> q;
  std::optional<double> scale;  ///< As in AttendOptions: of these queries.
  double softcap = 0;           ///< The same.
  /**
   * (batch) Rows of the page table that are filled for these sequences, in the order of the batch;
   * empty: none. Each row once.
   */
  std::vector<int64_t> page_rows;
  /** With page_rows, written: places in the batch of sequences that pages do not serve. */
  std::vector<int64_t>* unserved = nullptr;
};

class PARISKV_API Cache {
 public:
  explicit Cache(Config config, Resources resources = {});
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  const Config& config() const;

  /** A new, empty sequence. */
  SequenceId add();

  /** Looks sequences up, so that calls need not. */
  Batch batch(std::vector<SequenceId> sequences) const;

  /** Forgets a sequence: its bytes are zeroed and given back. */
  void remove(SequenceId sequence, Stream stream = {});

  /** A new sequence equal to this one. Storage is shared until either changes. */
  SequenceId fork(SequenceId sequence, Stream stream = {});

  /**
   * The same with the first tokens alone, in every layer: what a fork is once it was cut to them,
   * without the memory of what is cut off.
   * @param tokens  1 or more, at most those of the shortest layer
   */
  SequenceId fork_prefix(SequenceId sequence, int64_t tokens, Stream stream = {});

  /**
   * Beam reordering: afterwards `sequences[i]` holds what `sequences[source[i]]`
   * held. No row is copied.
   */
  void reorder(const Batch& sequences, const std::vector<int64_t>& source, Stream stream = {});

  /** Drops the last tokens of each sequence in every layer, also across a flush. */
  void truncate(const Batch& sequences, const Cut& cut, Stream stream = {});

  /**
   * Appends keys and values, and attends to nothing: a prompt's own attention is the model's, whose
   * K and V are at hand, or `attend`'s. Everything older than the local window enters the
   * retrieval zone, so a prompt in chunks ends as the prompt in one piece does.
   *
   * @param sequences  batch of them, each once: ids, or a Batch made ahead
   * @param lengths    (batch) tokens of each, 0 or more
   * @param k          (sum of lengths, kv_heads, head_dim) in the config's dtype, after RoPE
   * @param v          (sum of lengths, kv_heads, value_dim), in the same
   */
  void prefill(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
               const TensorView& k, const TensorView& v, const PrefillOptions& options = {},
               Stream stream = {});

  /**
   * Appends one token per sequence, then attends to what matters.
   *
   * @param q    (batch, query_heads, head_dim), after RoPE
   * @param k    (batch, kv_heads, head_dim), after RoPE
   * @param v    (batch, kv_heads, value_dim)
   * @param out  (batch, query_heads, value_dim), written; all in the config's dtype
   */
  void decode(int64_t layer, const Batch& sequences, const TensorView& q, const TensorView& k,
              const TensorView& v, const TensorView& out, const AttendOptions& options = {},
              Stream stream = {});

  /**
   * The same without a token: attends to what matters of the tokens that are stored, for layers
   * that share keys and values with another one. Changes nothing.
   */
  void decode(int64_t layer, const Batch& sequences, const TensorView& q, const TensorView& out,
              const AttendOptions& options = {}, Stream stream = {});

  /**
   * Before each replay of a graph of decodes, on a GPU. A decode that is called while its stream is
   * captured changes nothing; what it recorded decodes, each time it runs, one token of the
   * sequences last named here, in this order. Slots of the graph beyond them are idle, as are those
   * named kIdle here, whatever they were when it was recorded.
   *
   * Makes room for that token in every layer, flushing where that is due; so a graph appends to
   * each layer once. Until the replay is done decode nothing else and change none of these
   * sequences; `stream` has to be there until the next advance is, or the cache's end. Not with a
   * local window of 0.
   *
   *   capture: for each layer { ...; cache.decode(layer, batch, q, k, v, out, {}, stream); ... }
   *   each token: cache.advance(batch, stream); replay the graph on `stream`
   */
  void advance(const Batch& sequences, Stream stream = {});

  /**
   * Exact causal attention of the last stored tokens over everything stored: a
   * prompt's chunk after its prefill, a second turn of a chat, a draft to verify.
   * Query i of a sequence's `lengths[s]` sees positions 0 to total - lengths[s] + i.
   *
   * On a GPU all those rows are read once for every 128 queries of a kv head, over the bus where
   * they lie in host memory: for turns and drafts rather than for long prompts.
   *
   * @param lengths  (batch) queries of each sequence, at most its tokens
   * @param q        (sum of lengths, query_heads, head_dim)
   * @param out      (sum of lengths, query_heads, value_dim), written
   */
  void attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
              const TensorView& q, const TensorView& out, const AttendOptions& options = {},
              Stream stream = {});

  /**
   * Appends tokens and then attends from each of them: a turn, a chunk or a draft in one call.
   * Regions move as if the tokens were decoded one by one. A policy that learns from the queries
   * of a prompt is given these too, see PrefillOptions.
   *
   * @param k  (sum of lengths, kv_heads, head_dim), after RoPE
   * @param v  (sum of lengths, kv_heads, value_dim)
   */
  void attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
              const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
              const AttendOptions& options = {}, Stream stream = {});

  /**
   * `prefill` of a cache with borrowed rows (Config::borrowed), in place of k and v: the tokens'
   * rows are in the program's memory already, see borrowed.h.
   */
  void prefill_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                    const RowAddresses& rows, const PrefillOptions& options = {},
                    Stream stream = {});

  /** The same of `decode`: one address of K and one of V for each sequence. */
  void decode_rows(int64_t layer, const Batch& sequences, const TensorView& q,
                   const RowAddresses& rows, const TensorView& out,
                   const AttendOptions& options = {}, Stream stream = {});

  /** The same of the `attend` that appends tokens. */
  void attend_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                   const TensorView& q, const RowAddresses& rows, const TensorView& out,
                   const AttendOptions& options = {}, Stream stream = {});

  /**
   * Borrowed rows now lie elsewhere, as the same bytes: those of positions [begin, begin + length)
   * of each sequence. Reads none of them. A fork has addresses of its own, to be told as well.
   *
   * @param begin    (batch) first position of each sequence
   * @param lengths  (batch) how many follow, 0 or more
   */
  void move_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& begin,
                 const std::vector<int64_t>& lengths, const RowAddresses& rows, Stream stream = {});

  /**
   * Borrowed rows of these sequences have other numbers now, where they lie: makes the summaries of
   * all keys of their zones anew. Queries that prompts brought count as before. A fork has to be
   * named as well, and has summaries of its own from then on. Takes the room of these summaries
   * once more meanwhile, so that a call that fails changes nothing.
   */
  void rewrite_rows(int64_t layer, const Batch& sequences, Stream stream = {});

  /**
   * The cache's plain rows as pages, see pages.h. On a GPU, of memory of the library's own; throws
   * std::invalid_argument elsewhere. It is the same range for as long as the cache is there.
   */
  Pages pages() const;

  /**
   * A table for steps of up to so many sequences of up to so many tokens each: longer ones are not
   * served. From then on `advance` sets the lengths of the sequences that it names, row by row.
   * Another call makes another one, and graphs that were recorded with the last one are void.
   */
  PageTable page_table(int64_t sequences, int64_t tokens, Stream stream = {});

  /** Moves everything older than the local window to the retrieval zone, in every layer. */
  void flush(const Batch& sequences, Stream stream = {});

  /** The same for the sequences that there are when its turn comes. */
  void flush_all(Stream stream = {});

  /**
   * What decode would choose for this query now, and why. Changes nothing. A decode adds its
   * token first, which counts towards dense_below and may flush; here none is added.
   *
   * @param q  (query_heads, head_dim)
   */
  Explanation explain(int64_t layer, SequenceId sequence, const TensorView& q,
                      const AttendOptions& options = {}, Stream stream = {}) const;

  /** The summaries of a retrieval zone, unpacked. */
  Summaries summaries(int64_t layer, SequenceId sequence) const;

  /**
   * Copies stored rows out.
   *
   * @param begin  first position; k and v say how many follow
   * @param k      (tokens, kv_heads, head_dim), written
   * @param v      (tokens, kv_heads, value_dim), written
   */
  void read(int64_t layer, SequenceId sequence, int64_t begin, const TensorView& k,
            const TensorView& v, Stream stream = {}) const;

  /**
   * Writes a sequence to a file (but not borrowed rows): rows, summaries, the policy's state,
   * regions and settings, each part with a checksum. Changes nothing. The file appears in the place
   * of `path` when the disk has all of it; until then, and if anything fails, what was there stays.
   * On a GPU it waits for the work of earlier calls. An older file's mode, owner and access list
   * are kept; a link is followed, also to a file that is not there yet.
   *
   * @param path  of a file, in the system's own bytes; an older one is replaced
   */
  void save(SequenceId sequence, const std::string& path) const;

  /**
   * A new sequence, equal to the one that was saved: whatever follows gives the same bits. The file
   * may come from a cache on another device, and with other regions (but for the sink), budgets
   * and settings of the search; all that its bytes are made with has to be the same. Throws
   * std::invalid_argument with what was expected and what was found, and then adds nothing.
   */
  SequenceId load(const std::string& path, Stream stream = {});

  /** Tokens of a sequence in one layer. */
  int64_t length(SequenceId sequence, int64_t layer = 0) const;

  RegionCounts regions(SequenceId sequence, int64_t layer = 0) const;

  std::vector<SequenceId> sequences() const;

  /**
   * What the cache holds and has done. On a device it waits for the steps under way, and kAll reads
   * a few bytes of each layer of each sequence there: kCounted is for those who ask while they
   * serve.
   */
  Stats stats(StatsScope scope = StatsScope::kAll) const;

  /**
   * Takes memory for the rows and summaries of so many tokens of so many new sequences ahead of
   * them, and brings its pages into memory, on several threads: then prompts go to host memory at
   * the bus's rate from the first one on. Takes nothing where as much is free already. Throws
   * OutOfMemory where a budget has no room for it, or there is none. On a GPU with Placement::kHost
   * rows are in host memory, else on the device.
   *
   * The memory stays when sequences go, until `trim`, the end of the cache, or need of memory of
   * another kind.
   */
  void reserve(int64_t tokens, int64_t sequences = 1);

  /**
   * On a GPU: takes so many bytes of the device's memory now, for whatever comes, and keeps them
   * until `trim` or the end of the cache. A device maps memory for some 30 microseconds a megabyte,
   * which no prompt has to wait for then. What is ready counts as reserved once it is used. Throws
   * OutOfMemory, and has taken nothing, where the budget or the device has less,
   * std::invalid_argument where memory is not the cache's own.
   */
  void reserve_device(int64_t bytes);

  /**
   * Takes so many bytes of host memory for rows that leave a GPU. In the background a thread takes
   * them, 16 MB at a time: they count as reserved at once, and a prompt that needs one first waits
   * for that alone. What the system then refuses is asked for again when it is needed. A program's
   * own resource is asked by the caller, who waits. Throws OutOfMemory, and has taken nothing,
   * where the budget has no room, std::invalid_argument where no rows ever lie in host memory. The
   * memory stays as that of `reserve` does.
   */
  void reserve_host(int64_t bytes, bool background = false);

  /** Gives memory that nothing uses back to the device and the system. Waits for the device. */
  void trim();

 private:
  class PARISKV_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

/** The instruction set that the CPU backend runs on: "plain", "avx2" or "avx512". */
PARISKV_API const char* cpu_level();

/** Whether this build has a backend for the device. */
PARISKV_API bool is_built(DeviceType device);

/** Whether it does and such a device is there. */
PARISKV_API bool is_available(DeviceType device);

}  // namespace pariskv
