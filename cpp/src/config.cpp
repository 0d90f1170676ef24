#include "pariskv/config.h"

#include <limits>

#include "check.h"
#include "dispatch.h"
#include "row_format.h"
#include "tail_copies.h"

namespace pariskv {

namespace {

// No model comes near these. They keep products of sizes within 64 bits, and a slip of the
// hand from asking for a million threads.
constexpr int64_t kMostHeads = 1024;

constexpr int64_t kPolicysOwn = -1;  // a region size that the policy decides

/** Keys that summaries are made of together, with ParisKV; 0: each has its own. */
int64_t block_of(const PolicyConfig& policy) {
  const auto* paris_kv = std::get_if<ParisKV>(&policy);
  return paris_kv == nullptr ? 0 : paris_kv->resolved().block;
}

void within(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    fail("[config] ", field, ": expected ", low, " to ", high, ", got ", value);
  }
}

void region_within(const char* field, int64_t value, int64_t low) {
  if (value != kPolicysOwn && (value < low || value > kMostTokens)) {
    fail("[config] ", field, ": expected ", low, " to ", kMostTokens,
         ", or -1 for the policy's own, got ", value);
  }
}

void ratio(const char* field, double value) {
  if (!(value > 0 && value <= 1)) {  // also catches NaN
    fail("[config] policy.schedule: expected ", field, " above 0 and at most 1, got ", value);
  }
}

/**
 * The longer the zone, the smaller the share of it that has to be looked at closely. Whole keys
 * have the published shares up to 30'000 tokens, and from there on half of them, and less. Blocks
 * of keys need 5 % beside a tail of 1,024 rows: so they stay below the KL that more candidates
 * reach with half of the tail. From 100'000 tokens on 2 % find what 5 % find, but for about a
 * hundredth (bench/quality/RESULTS.md). What each share costs is in bench/notes/tried-quality.md.
 */
std::vector<ScheduleStep> schedule_of(bool has_blocks) {
  if (has_blocks) {
    return {{0, .50, .50}, {5'000, .05, .20}, {100'000, .02, .20}, {600'000, .0125, .20}};
  }
  return {{0, .50, .50},       {5'000, .25, .30},    {10'000, .20, .25},   {30'000, .05, .20},
          {100'000, .04, .20}, {250'000, .025, .20}, {600'000, .0125, .20}};
}

/** Checks K or V of borrowed rows. */
void check_borrowed(const std::string& half, BorrowedType type, int64_t stride, int64_t dim) {
  if (type > BorrowedType::kQ8_0) {
    fail("[config] borrowed.", half, ": expected a BorrowedType, got ", int(type));
  }
  if (type == BorrowedType::kQ8_0 && dim % kQ8Block != 0) {
    fail("[config] borrowed.", half, ": expected q8_0 with a multiple of ", kQ8Block,
         " dimensions, got ", dim, ": blocks would go across heads");
  }
  const int64_t bytes = half_bytes(row_type(type), dim), step = alignment_of(type);
  constexpr int64_t kMostStride = int64_t{1} << 40;
  if (stride != 0 && (stride < bytes || stride > kMostStride || stride % step != 0)) {
    fail("[config] borrowed.", half, "_head_stride: expected a multiple of ", step, " from ", bytes,
         " bytes, which a head takes, to ", kMostStride, ", or 0 for heads without a gap, got ",
         stride);
  }
}

}  // namespace

std::string name_of(const Device& device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "unknown";
}

void ParisKV::validate() const {
  within("policy.top_k", top_k, 1, kMostTokens);
  within("policy.min_candidates_per_row", min_candidates_per_row, 1, 1 << 20);
  if (block != 0 && block != 64 && block != 128 && block != 256) {
    fail(
        "[config] policy.block: expected 64, 128 or 256 keys that share a mean, or 0 for none, "
        "got ",
        block);
  }
  within("policy.tail_rows", tail_rows, 16, kMostCommonRows);
  if (error && !(*error > 0 && *error < 1)) {  // also catches NaN
    fail("[config] policy.error: expected an error above 0 and below 1, or none, got ", *error);
  }
  if (error && group_rule == GroupRule::kMeanQuery) {
    fail("[config] policy.error: expected none with the group_rule mean_query, got ", *error,
         ": its rows are ranked by the logits of one query, which say nothing of a share of the "
         "attention; attention_mass does");
  }
  if (error && resolved().tail == TailRule::kNone) {
    fail("[config] policy.error: expected none without a tail, got ", *error,
         ": keys that are not selected are then left out, and no sample estimates them; "
         "tail=\"sample\" has one");
  }
  int64_t previous = -1;
  for (const ScheduleStep& step : schedule) {
    if (step.from_tokens <= previous) {
      fail("[config] policy.schedule: expected from_tokens to rise from 0 or more, got ",
           step.from_tokens, " after ", previous);
    }
    previous = step.from_tokens;
    ratio("candidate_ratio", step.candidate_ratio);
    ratio("vote_ratio", step.vote_ratio);
  }
}

ParisKV ParisKV::resolved() const {
  ParisKV own = *this;
  if (scorer == Scorer::kVotes) own.block = 0;
  if (own.schedule.empty()) own.schedule = schedule_of(own.block > 0);
  if (own.tail == TailRule::kOwn) own.tail = own.block > 0 ? TailRule::kSample : TailRule::kNone;
  return own;
}

void HardKV::validate() const {
  within("policy.most", most, 1, kMostTokens);
  if (!(p > 0 && p <= 1)) {  // also catches NaN
    fail("[config] policy.p: expected a share above 0 and at most 1, got ", p);
  }
  if (least < 0 || least > most) {
    fail("[config] policy.least: expected 0 to policy.most (", most, "), got ", least);
  }
  if (pool < 1 || pool > 63 || pool % 2 == 0) {
    fail("[config] policy.pool: expected an odd number of neighbours, 1 to 63, got ", pool);
  }
  within("policy.patience", patience, 0, 15);
}

void PRKV::validate() const {
  if (page != 8 && page != 16 && page != 32 && page != 64) {
    fail("[config] policy.page: expected 8, 16, 32 or 64 neighbours, got ", page);
  }
  if (budget < page || budget > kMostTokens) {
    fail("[config] policy.budget: expected policy.page (", page, ") to ", kMostTokens,
         " rows, got ", budget);
  }
  if (static_share && !(*static_share >= 0 && *static_share <= 1)) {  // also catches NaN
    fail("[config] policy.static_share: expected a share of 0 to 1, or auto, got ", *static_share);
  }
}

void Config::validate() const {
  within("layers", layers, 1, 65536);
  within("kv_heads", kv_heads, 1, kMostHeads);
  within("query_heads", query_heads, 1, kMostHeads);
  if (query_heads % kv_heads != 0) {
    fail("[config] query_heads: expected a whole multiple of kv_heads (", kv_heads, "), got ",
         query_heads);
  }
  if (kv_heads > 1 && group() > 16) {
    fail("[config] query_heads: expected at most 16 for each of the ", kv_heads, " kv heads, got ",
         query_heads);
  }
  if (!contains(HeadDims{}, head_dim)) {
    fail("[config] head_dim: expected ", text_of(HeadDims{}), ", got ", head_dim);
  }
  if (value_dim != 0 && !contains(HeadDims{}, value_dim)) {
    fail("[config] value_dim: expected 0 (head_dim), ", text_of(HeadDims{}), ", got ", value_dim);
  }
  region_within("sink", sink, 0);
  region_within("local", local, 0);
  region_within("update", update, 1);
  if (dense_below != kDenseByBatch) region_within("dense_below", dense_below, 0);
  std::visit([](const auto& settings) { settings.validate(); }, policy);
  const auto* paris_kv = std::get_if<ParisKV>(&policy);
  if (paris_kv != nullptr && paris_kv->scorer == Scorer::kVotes && head_dim > kMaxVoteDim) {
    fail("[config] policy.scorer: expected sign_norm with a head_dim above ", kMaxVoteDim,
         ", got votes: a score is a byte, and the votes of ", head_dim, " dimensions do not fit");
  }
  const char* chooser = std::holds_alternative<HardKV>(policy) ? "HardKV"
                        : std::holds_alternative<PRKV>(policy) ? "PRKV"
                                                               : nullptr;
  if (chooser != nullptr && local == 0) {
    fail("[config] local: expected 1 token or more with the policy ", chooser,
         ", got 0: the last queries choose among the tokens before them");
  }
  if (kv_dtype == KVDType::kInt8 && chooser != nullptr) {
    fail("[config] kv_dtype: expected auto with the policy ", chooser,
         ", got int8: rows in 8 bits are for ParisKV alone");
  }
  if (borrowed) {
    if (device.type != DeviceType::kCpu) {
      fail("[config] borrowed: expected none on ", name_of(device),
           ": the CPU alone reads a program's rows in place");
    }
    if (paris_kv == nullptr) {
      fail("[config] borrowed: expected none with the policy ", chooser,
           ": it copies the rows that it keeps, and ParisKV alone reads all in place");
    }
    if (kv_dtype != KVDType::kAuto) {
      fail("[config] kv_dtype: expected auto with borrowed rows, got int8: they stay as they are");
    }
    check_borrowed("key", borrowed->key, borrowed->key_head_stride, head_dim);
    check_borrowed("value", borrowed->value, borrowed->value_head_stride,
                   value_dim == 0 ? head_dim : value_dim);
  }
  within("threads", threads, 0, 1024);
  within("memory_budget", memory_budget, 0, std::numeric_limits<int64_t>::max());
  within("host_budget", host_budget, 0, std::numeric_limits<int64_t>::max());
  within("row_cache", row_cache, -1, kMostTokens);
  if (segment_tokens == kPolicysOwn) return;
  within("segment_tokens", segment_tokens, 64, 1 << 20);
  if (segment_tokens % 64 != 0) {
    fail("[config] segment_tokens: expected a multiple of 64, got ", segment_tokens);
  }
  const int64_t block = block_of(policy);
  if (block > 0 && segment_tokens % block != 0) {
    fail("[config] segment_tokens: expected a multiple of policy.block (", block, "), got ",
         segment_tokens);
  }
}

Config Config::resolved() const {
  Config config = *this;
  const RegionDefaults own = std::visit(
      [](auto& settings) {
        settings = settings.resolved();
        return settings.kRegions;
      },
      config.policy);
  const auto resolve = [](int64_t& size, int64_t of_policy) {
    if (size == kPolicysOwn) size = of_policy;
  };
  resolve(config.sink, own.sink);
  resolve(config.local, own.local);
  resolve(config.update, own.update);
  const bool on_gpu = config.device.type == DeviceType::kCuda;
  const bool near = on_gpu && config.placement != Placement::kHost;
  const bool by_batch = near && std::holds_alternative<ParisKV>(config.policy);
  if (config.dense_below == kDenseByBatch && !by_batch) config.dense_below = kPolicysOwn;
  const int64_t far_or_cpu = on_gpu ? own.dense_below_far : own.dense_below;
  resolve(config.dense_below, near ? own.dense_below_on_gpu : far_or_cpu);
  if (value_dim == 0) config.value_dim = head_dim;
  resolve(config.segment_tokens, std::max<int64_t>(near ? 128 : 1024, block_of(policy)));
  if (config.borrowed) {
    const RowFormat rows = RowFormat::borrowed(head_dim, config.value_dim, *config.borrowed);
    BorrowedRows& lent = *config.borrowed;
    if (lent.key_head_stride == 0) lent.key_head_stride = rows.key_bytes();
    if (lent.value_head_stride == 0) lent.value_head_stride = rows.value_bytes();
  }
  return config;
}

int64_t Config::searched_from() const {
  const int64_t tokens = resolved().dense_below;
  return tokens == kDenseByBatch ? ParisKV::kSearchedFromByBatch : tokens;
}

bool operator==(const Config& a, const Config& b) {
  return a.layers == b.layers && a.query_heads == b.query_heads && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.value_dim == b.value_dim && a.dtype == b.dtype &&
         a.sink == b.sink && a.local == b.local && a.update == b.update &&
         a.dense_below == b.dense_below && a.policy == b.policy && a.device == b.device &&
         a.threads == b.threads && a.segment_tokens == b.segment_tokens &&
         a.memory_budget == b.memory_budget && a.placement == b.placement &&
         a.row_cache == b.row_cache && a.host_budget == b.host_budget && a.kv_dtype == b.kv_dtype &&
         a.borrowed == b.borrowed;
}

}  // namespace pariskv
