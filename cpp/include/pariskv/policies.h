/**
 * How rows are chosen: one struct of settings per policy, and their variant, `Config::policy`.
 * Each struct has its paper's region sizes, which a Config takes over where it names none.
 */
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "pariskv/export.h"

namespace pariskv {

/** The regions of a sequence, in tokens: [sink | retrieval | local | update buffer]. */
struct RegionDefaults {
  int64_t sink, local, update;
  // Sequences shorter than this are attended to in full:
  int64_t dense_below;         ///< on a CPU,
  int64_t dense_below_far;     ///< on a GPU whose rows lie in host memory,
  int64_t dense_below_on_gpu;  ///< and on one that keeps them in its own, whichever it is.
};

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

  friend bool operator==(const ScheduleStep& a, const ScheduleStep& b) {
    return a.from_tokens == b.from_tokens && a.candidate_ratio == b.candidate_ratio &&
           a.vote_ratio == b.vote_ratio;
  }
};

/** What becomes of the keys that are not selected. */
enum class TailRule : uint8_t {
  kOwn,     ///< kSample where there are blocks, else kNone
  kNone,    ///< Left out: attention is shared out among the rows that are attended to.
  kSample,  ///< Estimated from a row of each interval, with the weight of the keys around it.
};

/**
 * ParisKV: every key is scored from a summary of a few bytes, a few percent are reranked, and the
 * best rows are fetched for each query. The paper's own setting is Scorer::kVotes,
 * GroupRule::kMeanQuery and 10 % from 30,000 tokens on.
 */
struct ParisKV {
  int64_t top_k = 100;  ///< Rows attended to per kv head besides the resident ones.
  Scorer scorer = Scorer::kSignNorm;
  GroupRule group_rule = GroupRule::kAttentionMass;
  std::vector<ScheduleStep> schedule;  ///< Empty: one for such keys, with blocks or whole.
  int64_t min_candidates_per_row = 4;  ///< Candidates are never fewer than this times top_k.
  /**
   * Of the signs of the rotation and of the tail's rows, equal on every backend. None: the rows of
   * each sequence's tail are drawn by a secret, which the system gives each cache, so that no text
   * can be written for the rows that a step sees; signs are those of `kSignsSeed`. Forks, loaded
   * files and replays keep what their sequence has.
   */
  std::optional<uint64_t> seed = 42;
  /**
   * Neighbouring keys that share a mean: 64, 128 or 256. Summaries then hold what is left of a key
   * without it, with the channels of keys and queries balanced. 0: whole keys, as published; so
   * it is with votes, whatever this says.
   */
  int64_t block = 64;
  TailRule tail = TailRule::kOwn;
  int64_t tail_rows = 1024;  ///< Rows that are sampled per kv head, in 8 bits: as many to twice
                             ///< as many.
  /**
   * Rows are taken, best first, until the error that the sample is expected to add for the
   * candidates that are left is at most this, in (0, 1), less what other keys add: its standard
   * deviation, as a share of the spread of values. At least 16 rows, at most top_k. What was
   * reached is in Stats. Empty: always top_k rows.
   */
  std::optional<double> error;

  static constexpr RegionDefaults kRegions = {4, 256, 512, 4096, 2048, 8192};
  /** Config::searched_from with kDenseByBatch: where large batches begin to search. */
  static constexpr int64_t kSearchedFromByBatch = 5632;
  static constexpr uint64_t kSignsSeed = 42;  ///< Where `seed` is none.

  /** What the signs of the rotation follow from: summaries are made with them. */
  uint64_t signs_seed() const { return seed.value_or(kSignsSeed); }

  /** With numbers and rules in place of what is the policy's own. */
  PARISKV_API ParisKV resolved() const;

  /** Throws std::invalid_argument on the first setting that does not fit. */
  PARISKV_API void validate() const;

  friend bool operator==(const ParisKV& a, const ParisKV& b) {
    return a.top_k == b.top_k && a.scorer == b.scorer && a.group_rule == b.group_rule &&
           a.schedule == b.schedule && a.min_candidates_per_row == b.min_candidates_per_row &&
           a.seed == b.seed && a.block == b.block && a.tail == b.tail &&
           a.tail_rows == b.tail_rows && a.error == b.error;
  }
};

/** What the rows of a zone are ranked by when some of them are to be kept. */
enum class KeepMetric : uint8_t {
  kAttention,  ///< The attention that the last queries paid to a row.
  kSnapKv,     ///< The attention of the best of a row's neighbours: SnapKV's pooling.
};

/** What becomes of the K and V of a zone whose rows were chosen from. */
enum class ZoneRows : uint8_t {
  kHost,     ///< All stay stored, in host memory, or on a GPU if Config::placement says so.
  kDropped,  ///< Whole segments are given back as decoding goes on: memory stops growing.
};

/**
 * HARD-KV: nothing is searched for. Each time that tokens enter a retrieval zone, the last queries
 * say how much attention its rows get, and each kv head keeps as many as it needs for a share p of
 * that; steps attend to these until the next time. With p = 1 every head keeps `most` rows: a
 * SnapKV that is refreshed. All rows stay stored, so that truncation, forks and exact attention are
 * exact; ZoneRows::kDropped gives that up for memory. Until there were queries to choose by, the
 * zone is attended to in full.
 */
struct HardKV {
  int64_t most = 2048;  ///< Rows that a kv head keeps of the zone, at most.
  double p = .9;        ///< Share of the attention to the zone that the kept rows get, in (0, 1].
  int64_t least = 0;    ///< Rows that a kv head keeps at least.
  KeepMetric metric = KeepMetric::kSnapKv;
  int64_t pool = 7;  ///< Neighbours that kSnapKv looks at, the row among them: odd.
  /** Choices that a row may lose and still be held, beside the rows that are attended to. */
  int64_t patience = 1;
  /**
   * kDropped: a decode that appends a token gives back the segments of the zone whose rows were
   * chosen from before it. Then `attend`, `read` and `truncate` refuse to do without these rows, as
   * does a prefill without queries.
   */
  ZoneRows placement = ZoneRows::kHost;

  static constexpr RegionDefaults kRegions = {4, 32, 128, 0, 0, 0};
  static constexpr int64_t kRecentQueries = 32;  ///< Of the last positions: they choose.

  /** The same: nothing is left to the policy. */
  HardKV resolved() const { return *this; }

  /** Throws std::invalid_argument on the first setting that does not fit. */
  PARISKV_API void validate() const;

  friend bool operator==(const HardKV& a, const HardKV& b) {
    return a.most == b.most && a.p == b.p && a.least == b.least && a.metric == b.metric &&
           a.pool == b.pool && a.patience == b.patience && a.placement == b.placement;
  }
};

/** What stands for the keys of a page: their middle, channel by channel, and how far they reach. */
enum class PageDigest : uint8_t {
  kMean,  ///< To their mean distance from it: no bound, but the better order.
  kMax,   ///< To the farthest of them: no key's product with a query is above the page's score.
};

/**
 * PRKV: a budget of rows of the retrieval zone is spent on two things. Rows that the last queries
 * looked at most are kept, chosen anew each time that tokens enter the zone; and pages of
 * neighbours are found for each query by their digests, without the rows that are kept. With
 * static_share 0 there are pages alone, which is ArkVale; with 1 kept rows alone, a SnapKV that is
 * refreshed. All rows stay stored, so that truncation, forks and exact attention are exact. Until
 * there were queries to choose by, pages have the whole budget.
 */
struct PRKV {
  int64_t budget = 1024;  ///< Rows of a zone that a step attends to per kv head, at most.
  /**
   * Of the budget, for rows that are kept, 0 to 1, in whole pages' worth; none: as far as the
   * first and the last query of a prompt agree on the best rows.
   */
  std::optional<double> static_share = .25;
  int64_t page = 32;  ///< Neighbours: 8, 16, 32 or 64.
  PageDigest digest = PageDigest::kMean;

  static constexpr RegionDefaults kRegions = {4, 64, 128, 0, 0, 0};
  static constexpr int64_t kRecentQueries = 64;  ///< Of the last positions: they choose.

  /** The same: nothing is left to the policy. */
  PRKV resolved() const { return *this; }

  /** Throws std::invalid_argument on the first setting that does not fit. */
  PARISKV_API void validate() const;

  friend bool operator==(const PRKV& a, const PRKV& b) {
    return a.budget == b.budget && a.static_share == b.static_share && a.page == b.page &&
           a.digest == b.digest;
  }
};

/** The policies there are. */
using PolicyConfig = std::variant<ParisKV, HardKV, PRKV>;

}  // namespace pariskv
