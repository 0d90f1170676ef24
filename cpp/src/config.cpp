#include "pariskv/config.h"

#include <cmath>

#include "check.h"

namespace pariskv {

namespace {

void at_least(const char* field, int64_t value, int64_t low) {
  if (value < low) fail("[config] ", field, ": expected at least ", low, ", got ", value);
}

void ratio(const char* field, double value) {
  if (!(value > 0 && value <= 1)) {  // also catches NaN
    fail("[config] schedule: expected ", field, " above 0 and at most 1, got ", value);
  }
}

}  // namespace

void Config::validate() const {
  constexpr int64_t kMost = int64_t{1} << 30;  // keeps products of sizes within 64 bits
  at_least("layers", layers, 1);
  at_least("kv_heads", kv_heads, 1);
  at_least("query_heads", query_heads, 1);
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
  for (const int64_t size : {layers, kv_heads, query_heads, sink, local, update, top_k, dense_below,
                             segment_tokens, min_candidates_per_row, threads}) {
    if (size > kMost) fail("[config] expected sizes up to ", kMost, ", got ", size);
  }
  at_least("sink", sink, 0);
  at_least("local", local, 0);
  at_least("update", update, 1);
  at_least("top_k", top_k, 1);
  at_least("dense_below", dense_below, 0);
  at_least("min_candidates_per_row", min_candidates_per_row, 1);
  at_least("threads", threads, 0);
  at_least("memory_budget", memory_budget, 0);
  at_least("segment_tokens", segment_tokens, 64);
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
