/**
 * What a cache is told when it is made: plain data. Sizes are the published ones, how it searches
 * is ours; the paper's way is Scorer::kVotes, GroupRule::kMeanQuery and 10 % from 30,000 tokens on.
 * `Config::validate` says in a sentence what does not fit.
 *
 * Memory for each token, layer and kv head: its K and V, and a summary of 43 bytes with 64
 * dimensions, 83 with 80 to 128, 163 with 256. A cache on a GPU has summaries there and K and V
 * where `placement` says; those of a prompt are on the GPU until they have been copied.
 */
#pragma once

#include <cstdint>
#include <vector>

#include "pariskv/tensor_view.h"

namespace pariskv {

/** How every key of the retrieval zone gets its coarse integer score. */
enum class Scorer : uint8_t {
  kSignNorm,  ///< Signs of the rotated key against the 5-bit query, times the key's norm.
  kVotes,     ///< The paper's: tiered votes for the centroids nearest to the query.
};

/** How the query heads that share a kv head agree on rows. */
enum class GroupRule : uint8_t {
  kAttentionMass,  ///< A row is worth the attention it would get, averaged over the heads.
  kMeanQuery,      ///< The paper's: the heads' queries are averaged before the search.
};

/** From `from_tokens` retrieval tokens on, these ratios hold. */
struct ScheduleStep {
  int64_t from_tokens = 0;
  double candidate_ratio = 0;  ///< Share of the zone that is reranked, in (0, 1].
  double vote_ratio = 0;       ///< Share of the keys that get a vote in a subspace, in (0, 1].
};

/** Where a cache on a GPU keeps the K and V rows of retrieval zones. */
enum class Placement : uint8_t {
  kHost,    ///< In host memory, fetched over the bus: room for far more tokens.
  kDevice,  ///< In the GPU's own memory.
};

struct Config {
  // The model.
  int64_t layers = 1;
  /** A whole multiple, 1 to 16 times, of kv_heads; any number with a single kv head. */
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  ///< 64, 80, 96, 128 or 256.
  DType dtype = DType::kBFloat16;

  // The regions of a sequence, in tokens: [sink | retrieval | local | update buffer]. With
  // local 0 a token may enter the retrieval zone, and be left unselected, as it arrives.
  int64_t sink = 4;
  int64_t local = 256;
  int64_t update = 512;

  // The search.
  int64_t top_k = 100;         ///< Rows attended to per kv head besides the resident ones.
  int64_t dense_below = 2048;  ///< Sequences shorter than this are attended to in full.
  Scorer scorer = Scorer::kSignNorm;
  GroupRule group_rule = GroupRule::kAttentionMass;
  // The published steps up to 30'000 tokens; from there on half of what is published, and less: the
  // longer the zone, the smaller the share of it that has to be looked at closely. What each share
  // costs and what it catches is in bench/notes/quality.md.
  std::vector<ScheduleStep> schedule = {
      {0, .50, .50},       {5'000, .25, .30},    {10'000, .20, .25},   {30'000, .05, .20},
      {100'000, .04, .20}, {250'000, .025, .20}, {600'000, .0125, .20}};
  int64_t min_candidates_per_row = 4;  ///< Candidates are never fewer than this times top_k.
  uint64_t seed = 42;                  ///< Of the rotation's signs, equal on every backend.

  // The machine.
  Device device;
  int64_t threads = 0;            ///< Of the CPU backend; 0 takes one per core.
  int64_t segment_tokens = 1024;  ///< The store grows by this much; a multiple of 64.
  int64_t memory_budget = 0;      ///< In bytes, over all it holds on its device; 0 is no limit.
  Placement placement = Placement::kHost;  ///< Of a cache on a GPU.
  /**
   * Fetched rows per kv head, layer and sequence that such a cache keeps on the GPU, so that a row
   * that stays selected crosses the bus once: rounded up to a power of two, at least 16. 0: none;
   * -1: twice top_k. Results are the same bits either way.
   */
  int64_t row_cache = -1;
  int64_t host_budget = 0;  ///< In bytes, of host memory for a cache on a GPU; 0: no limit.

  int64_t group() const { return query_heads / kv_heads; }

  /** Throws std::invalid_argument on the first thing that does not fit. */
  void validate() const;
};

}  // namespace pariskv
