#pragma once

#include <cstdint>
#include <limits>
#include <variant>
#include <vector>

#include "pariskv/memory.h"

namespace pariskv {

/** How many tokens of one layer of one sequence lie in each region. */
struct RegionCounts {
  int64_t sink = 0;
  int64_t retrieval = 0;
  int64_t local = 0;
  int64_t buffer = 0;
  int64_t dropped = 0;  ///< Of retrieval: rows that were given back, see HardKV::placement.
  int64_t total() const { return sink + retrieval + local + buffer; }
};

/** How much of Stats is filled in. */
enum class StatsScope {
  kAll,
  /** Without what each sequence is asked for: tokens, kept_rows, dropped_rows, unusable_keys: 0. */
  kCounted,
};

/** The contents and the counters of a cache, since it was made. */
struct Stats {
  MemoryUse memory;       ///< Of the cache's device.
  MemoryUse host_memory;  ///< Host memory of a cache on a GPU.
  int64_t sequences = 0;
  int64_t tokens = 0;           ///< Over all layers and sequences.
  int64_t row_bytes = 0;        ///< K and V, in whole row blocks; a shared one counts once. Of
                                ///< borrowed rows, their addresses.
  int64_t offloaded_bytes = 0;  ///< Of row_bytes, in host memory.
  int64_t summary_bytes = 0;    ///< Key summaries, in whole segments, and their statistics.
  int64_t workspace_bytes = 0;  ///< Scratch of the verbs, kept from call to call.
  int64_t flushes = 0;          ///< Times that tokens moved to a retrieval zone while decoding.
  int64_t encoded_keys = 0;     ///< Keys summarised, over kv heads.
  int64_t kept_rows = 0;   ///< Kept, or copied rows of a tail; over layers, sequences and kv heads.
  int64_t kept_bytes = 0;  ///< Copies of these, and the queries that are remembered.
  int64_t keeps = 0;       ///< Times that rows were chosen to be kept, per layer.
  int64_t dropped_rows = 0;   ///< Of the retrieval zones, given back: over kv heads, as kept_rows.
  int64_t unusable_keys = 0;  ///< Of the retrieval zones, never selected, over kv heads: not
                              ///< finite, or (ParisKV without blocks) zero. HardKV: 0.
  int64_t decode_tokens = 0;  ///< Per layer: a step of 32 layers counts 32.
  int64_t searched_tokens = 0;  ///< Of decode_tokens: searched the retrieval zone.
  int64_t candidates = 0;       ///< Reranked, over kv heads.
  int64_t fetched_rows = 0;     ///< Selected and attended to, over kv heads.
  int64_t cached_rows = 0;      ///< Of fetched_rows: found in the row cache of a GPU.
  /**
   * With ParisKV::error, and of steps with AttendOptions::error: the error that was predicted, and
   * the share of the attention of the rows that were attended to exactly, as searches estimated
   * both, over tokens, layers and kv heads: the mean, and the worst of all. NaN when none did.
   */
  double mean_error = std::numeric_limits<double>::quiet_NaN();
  double worst_error = std::numeric_limits<double>::quiet_NaN();
  double mean_mass = std::numeric_limits<double>::quiet_NaN();
  double least_mass = std::numeric_limits<double>::quiet_NaN();
};

/** The path of a search by ParisKV, from coarse scores to estimates; see Explanation. */
struct ParisKVExplanation {
  int64_t kv_heads = 0;
  int64_t query_heads = 0;
  int64_t candidates = 0;                    ///< Width of candidate_positions.
  std::vector<uint8_t> coarse;               ///< (kv_heads, zone_tokens): 0 is never selected.
  std::vector<int64_t> candidate_positions;  ///< (kv_heads, candidates), ascending.
  std::vector<float> estimated;              ///< (query_heads, selected): logits from the codes.
  /**
   * (kv_heads): the error that is predicted for this step, and the share of the attention of the
   * rows attended to exactly, both as estimated; NaN where no query is finite. Empty without a
   * sample, and with GroupRule::kMeanQuery.
   */
  std::vector<float> error, mass;
};

/** What HARD-KV has besides the rows that it keeps; see Explanation. */
struct HardKVExplanation {
  int64_t kv_heads = 0;
  std::vector<int64_t> held;  ///< (kv_heads, width) positions, ascending: they may come back.
};

/** What PRKV found for a query; see Explanation. Pages have numbers: position / page. */
struct PRKVExplanation {
  int64_t kv_heads = 0;
  int64_t static_rows = 0;         ///< That the budget has for kept rows.
  int64_t first_page = 0;          ///< Of the zone.
  std::vector<float> page_scores;  ///< (kv_heads, pages of the zone): mean of the group's heads.
  std::vector<int64_t> pages;      ///< (kv_heads, width) that were found, best first.
};

/**
 * Why one query attends where it does; see Cache::explain. Arrays are row-major
 * and padded to the same width for every head: positions with -1, numbers with NaN. They are
 * empty when nothing was searched, `kept` when nothing was kept; with both empty the whole zone is
 * attended to.
 */
struct Explanation {
  int64_t kv_heads = 0;
  int64_t query_heads = 0;
  int64_t zone_begin = 0;  ///< First position of the retrieval zone.
  int64_t zone_tokens = 0;
  int64_t selected = 0;            ///< Width of positions.
  bool searched = false;           ///< False: nothing was selected for this query.
  std::vector<int64_t> positions;  ///< (kv_heads, selected), best first.
  std::vector<float> worth;        ///< (kv_heads, selected): the order is by this.
  std::vector<float> exact;        ///< (query_heads, selected): logits from the rows.
  std::vector<int64_t> kept;       ///< (kv_heads, width) positions, ascending: see HardKV, PRKV.
  /** How the policy came to these rows; empty when all of the zone is attended to. */
  std::variant<std::monostate, ParisKVExplanation, HardKVExplanation, PRKVExplanation> details;
};

/**
 * The key summaries of one layer of one sequence, unpacked, for positions
 * zone_begin to zone_begin + tokens; see Cache::summaries. With blocks, signs, magnitudes, weights
 * and norms are those of key / balance - mean, the mean being that of the key's block.
 */
struct Summaries {
  int64_t kv_heads = 0;
  int64_t tokens = 0;
  int64_t zone_begin = 0;
  int64_t rotated_dim = 0;
  int64_t subspaces = 0;
  std::vector<uint8_t> signs;       ///< (kv_heads, tokens, subspaces): bit j is dim 8b+j >= 0.
  std::vector<uint8_t> magnitudes;  ///< (kv_heads, tokens, rotated_dim): level 0 to 7.
  std::vector<float> weights;       ///< (kv_heads, tokens, subspaces): w_b, as it will be used.
  std::vector<float> norms;         ///< (kv_heads, tokens): as the coarse score sees them.
  int64_t block = 0;                ///< Keys that share a mean; 0: none do, and the rest is empty.
  int64_t blocks = 0;               ///< That the zone has keys of: block b is b0 + b of the
                                    ///< sequence, with b0 = zone_begin / block.
  int64_t channels = 0;             ///< Of a key; set by policies with means or digests.
  std::vector<float> means;         ///< (kv_heads, blocks, channels): of balanced keys.
  std::vector<float> balance;       ///< (kv_heads, channels): <q, k> = <balance q, k / balance>.
  int64_t page = 0;                 ///< Keys that share a digest; 0: none do.
  int64_t pages = 0;                ///< Of the zone: the first has number zone_begin / page.
  std::vector<float> middles;       ///< (kv_heads, pages, channels) c of a page's keys; NaN: none.
  std::vector<float> distances;     ///< (kv_heads, pages, channels) how far they are from c.
};

}  // namespace pariskv
