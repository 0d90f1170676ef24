/**
 * What a cache is told when it is made: plain data. `Config::validate` says in a sentence what
 * does not fit.
 *
 * Memory for each token, layer and kv head: its K and V, and what the policy keeps beside them;
 * for ParisKV, with blocks of 64, a summary of 44 bytes with 64 dimensions, 85 with 80 to 128,
 * 167 with 192 and 256, 331 with 512. A cache on a GPU has summaries there and K and V where
 * `placement` says; those of a prompt are on the GPU until they have been copied.
 */
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pariskv/borrowed.h"
#include "pariskv/export.h"
#include "pariskv/policies.h"
#include "pariskv/sizes.h"
#include "pariskv/tensor_view.h"

namespace pariskv {

/** "cpu" or "cuda:<index>". */
PARISKV_API std::string name_of(const Device& device);

/** Where a cache on a GPU keeps the K and V rows of retrieval zones. */
enum class Placement : uint8_t {
  kAuto,    ///< In the GPU's own memory as far as there is room, the rest in host memory.
  kHost,    ///< In host memory, fetched over the bus: room for far more tokens.
  kDevice,  ///< In the GPU's own memory.
};

/** How rows of retrieval zones are stored. */
enum class KVDType : uint8_t {
  kAuto,  ///< As all others, in Config::dtype.
  kInt8,  ///< K and V each as numbers of 8 bits and a float that they are multiplied by.
};

/** How exactly `attend` adds values up where they are of 16 bits. */
enum class Precision : uint8_t {
  kExact,  ///< Weights in two 16-bit terms: the output is that of float32, rounded once.
  /**
   * Weights are rounded to 16 bits, as flash attention does: each by up to 2^-8 of itself in
   * bfloat16 and 2^-11 in float16. Over many rows that averages out. Logits and log-sum-exps stay
   * those of float32. In float32, and on the CPU, it is kExact.
   */
  kFast,
};

/** Of a cache's device, and of host memory beside a GPU. */
struct Bytes {
  int64_t device = 0;
  int64_t host = 0;
};

/** Where bytes lie. */
enum class Place : uint8_t {
  kDevice,  ///< Of the cache: a GPU, or on the CPU all there is.
  kHost,    ///< Host memory beside a GPU.
  kEither,  ///< Of a GPU as long as there is room, then in host memory: with Placement::kAuto.
};

/** What a cache is to hold at once. */
struct Load {
  int64_t longest = kMostTokens;  ///< Tokens of a sequence, at most.
  int64_t sequences = 1;          ///< 0: what tokens take alone.
  /**
   * Of all of them, whatever their lengths, each rounded up to `multiple`; 0: what sequences take
   * besides. Left out: they may all be of the longest.
   */
  std::optional<int64_t> tokens{};
  int64_t multiple = 1;  ///< A host counts lengths in blocks of so many tokens.
};

/** Bytes that have a name: of docs/memory.md, "How many sequences fit". */
struct Entry {
  std::string_view name;
  Place place;
  int64_t bytes;
};

struct Footprint {
  std::vector<Entry> entries;  ///< Those of any bytes.

  PARISKV_API int64_t at(Place place) const;
  PARISKV_API int64_t of(std::string_view name) const;  ///< 0 where there are none.
};

/**
 * Config::dense_below of ParisKV on a GPU that keeps rows as long as there is room: each step looks
 * at its batch, and attends in full where that takes as long as a search. A step of up to 16 kv
 * heads is faster below 14,336 tokens, and results depend on the batch. Elsewhere it is -1.
 */
inline constexpr int64_t kDenseByBatch = -2;

struct Config {
  // The model.
  int64_t layers = 1;
  /** A whole multiple, 1 to 16 times, of kv_heads; any number with a single kv head. */
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;   ///< Of queries and keys: one of HeadDims (sizes.h).
  int64_t value_dim = 0;  ///< Of values and outputs: one of HeadDims; 0: head_dim.
  DType dtype = DType::kBFloat16;

  // The regions of a sequence, in tokens: [sink | retrieval | local | update buffer]. With
  // local 0 a token may enter the retrieval zone, and be left unselected, as it arrives.
  // -1: the policy's own sizes, RegionDefaults.
  int64_t sink = -1;
  int64_t local = -1;
  int64_t update = -1;
  /** Sequences shorter than this are attended to in full; or kDenseByBatch. */
  int64_t dense_below = -1;

  PolicyConfig policy;  ///< How rows are chosen.
  /** Of rows of the zone, with ParisKV. Sink, local window and buffer stay in dtype. */
  KVDType kv_dtype = KVDType::kAuto;
  /** Set: rows stay in the program's memory. Of a cache on the CPU, with ParisKV. */
  std::optional<BorrowedRows> borrowed;

  // The machine.
  Device device;
  /** Of the CPU backend, with the caller's; 0: one per core. Of an executor, at most so many. */
  int64_t threads = 0;
  /**
   * Tokens that have their summaries in one piece, and on a GPU their rows, by which the store
   * grows there; a multiple of 64. On the CPU rows come in blocks of 64 tokens. -1: 128 tokens on a
   * GPU that keeps rows as long as there is room, else 1,024.
   */
  int64_t segment_tokens = -1;
  /**
   * In bytes, over all it holds on its device. 0 is no limit, but with Placement::kAuto nine tenths
   * of what is free when the cache is made.
   */
  int64_t memory_budget = 0;
  Placement placement = Placement::kAuto;  ///< Of rows of the zone, of a cache on a GPU.
  /**
   * Fetched rows per kv head, layer and sequence that such a cache keeps on the GPU, so that a row
   * that stays selected crosses the bus once: rounded up to a power of two, at least 16. 0: none;
   * -1: twice the rows that a step selects. Results are the same bits either way.
   */
  int64_t row_cache = -1;
  int64_t host_budget = 0;  ///< In bytes, of host memory for a cache on a GPU; 0: no limit.

  int64_t group() const { return query_heads / kv_heads; }

  /** Throws std::invalid_argument on the first thing that does not fit. */
  PARISKV_API void validate() const;

  /** Tokens from which a step may search: dense_below, or the least of any batch. */
  PARISKV_API int64_t searched_from() const;

  /** The same with its own sizes for all left out: what a cache goes by, and its `config()`. */
  PARISKV_API Config resolved() const;

  /**
   * A bound of memory by name and place, for programs that decide how many sequences they begin:
   * at any time, also inside a call, sequences take at most this, whatever their lengths, each up
   * to Load::longest. A fork counts like any other sequence.
   *
   * What they take is Stats::memory.live without workspace_bytes and without the same of the
   * cache before its first sequence, and Stats::host_memory.live. Not in it: rows in dtype of the
   * tokens of a prefill or attend with kv_dtype int8; with Placement::kHost, rows on their way to
   * host memory; summaries that rewrite_rows makes anew; sequences from files of caches with other
   * regions. With Placement::kAuto "resident rows" and "opening rows" are among "rows" and counted
   * again: they are what cannot leave.
   */
  PARISKV_API Footprint footprint(const Load& load = {}) const;

  /**
   * The same as two sums, of which one grows with tokens:
   *
   *   tokens * bytes_per_token(most) + sequences * bytes_per_sequence(most, multiple)
   *
   * With whole segments (segment_tokens) as `multiple` nothing is lost to rounding; of single
   * tokens, up to a segment a sequence is, on the CPU up to 64 tokens where it has no zone. With
   * Placement::kAuto they are of rows that stay: while the budget has room for the bound, none
   * have to leave.
   *
   * @param most_tokens  of a sequence. The fewer, the less: short ones have no summaries
   */
  PARISKV_API Bytes bytes_per_token(int64_t most_tokens = kMostTokens) const;
  PARISKV_API Bytes bytes_per_sequence(int64_t most_tokens = kMostTokens,
                                       int64_t multiple = 1) const;

  PARISKV_API friend bool operator==(const Config& a, const Config& b);
  friend bool operator!=(const Config& a, const Config& b) { return !(a == b); }
};

}  // namespace pariskv
