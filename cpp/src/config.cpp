#include "pariskv/config.h"

#include <limits>

#include "check.h"

namespace pariskv {

namespace {

void within(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    fail("[config] ", field, ": expected ", low, " to ", high, ", got ", value);
  }
}

void ratio(const char* field, double value) {
  if (!(value > 0 && value <= 1)) {  // also catches NaN
    fail("[config] schedule: expected ", field, " above 0 and at most 1, got ", value);
  }
}

}  // namespace

void Config::validate() const {
  // No model comes near these. They keep products of sizes within 64 bits, and a slip of the
  // hand from asking for a million threads.
  constexpr int64_t kMostTokens = int64_t{1} << 23;
  constexpr int64_t kMostHeads = 1024;
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
  if (head_dim != 64 && head_dim != 80 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    fail("[config] head_dim: expected 64, 80, 96, 128 or 256, got ", head_dim);
  }
  within("sink", sink, 0, kMostTokens);
  within("local", local, 0, kMostTokens);
  within("update", update, 1, kMostTokens);
  within("top_k", top_k, 1, kMostTokens);
  within("dense_below", dense_below, 0, kMostTokens);
  within("min_candidates_per_row", min_candidates_per_row, 1, 1 << 20);
  within("threads", threads, 0, 1024);
  within("memory_budget", memory_budget, 0, std::numeric_limits<int64_t>::max());
  within("host_budget", host_budget, 0, std::numeric_limits<int64_t>::max());
  within("row_cache", row_cache, -1, kMostTokens);
  within("segment_tokens", segment_tokens, 64, 1 << 20);
  if (segment_tokens % 64 != 0) {
    fail("[config] segment_tokens: expected a multiple of 64, got ", segment_tokens);
  }
  if (schedule.empty()) fail("[config] schedule: expected at least one step, got none");
  int64_t previous = -1;
  for (const ScheduleStep& step : schedule) {
    if (step.from_tokens <= previous) {
      fail("[config] schedule: expected from_tokens to rise from 0 or more, got ", step.from_tokens,
           " after ", previous);
    }
    previous = step.from_tokens;
    ratio("candidate_ratio", step.candidate_ratio);
    ratio("vote_ratio", step.vote_ratio);
  }
}

}  // namespace pariskv
