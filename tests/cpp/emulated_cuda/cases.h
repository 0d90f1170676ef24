/** What is run on the emulator and beside it on the CPU, and what came of it. */
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "pariskv/pariskv.h"

namespace pariskv::test {

/** A life of one cache: a prefill, some decode steps, and what happens between. */
struct Case {
  std::string name;
  Config config;
  int64_t tokens = 900;  // of the first sequence; others have their own
  int64_t batch = 1;
  int64_t chunks = 1;    // of the prefill
  bool packed = false;   // all prompts in one call
  bool queries = false;  // prompts bring theirs
  int64_t steps = 3;
  int64_t flush_after = -1, truncate_after = -1, truncate_by = 0;  // a step
  int64_t fork_after = -1;   // a step: a fork takes the place of the first sequence
  int64_t saved_after = -1;  // a step: all sequences go to files and come back from them
  int64_t attended = 5;      // tokens that are attended to at once in the end, at most
  bool fast = false;         // and once more with Precision::kFast
  double softcap = 0;
  bool sink_bias = false;
  int64_t gap = 0;             // elements between rows, which nobody may write to
  bool equal_keys = false;     // so that order alone decides
  bool apart = false;          // steps of a decode are launched one by one
  bool replayed = false;       // all steps but the first are of one graph
  bool errors = false;         // steps tell theirs
  bool idle = false;           // each step has another slot without a sequence; a graph is recorded
                               // over such slots alone
  bool hostile = false;        // queries and a key that are not finite, or zero
  bool infinite = false;       // values of many rows, and keys of some
  int64_t device_segment = 0;  // segment_tokens there, where it differs
  int device = 1;              // an index into the emulator's
  int twin = -1;               // another, whose output has to be the same bit for bit
};

/** A life over kept rows or pages: chosen from the prompt, and again at a flush every 8 steps. */
Case life_of(const PolicyConfig& policy, std::string name, int64_t tokens);

/** For the messages of GoogleTest, which would print bytes. */
void PrintTo(const Case& c, std::ostream* out);

/** A life of searches: one sequence of 900 tokens, and what `change` makes of it. */
Case search_case(const char* name, const std::function<void(Case&, Config&)>& change);

std::vector<Case> all_cases();
std::vector<Case> attend_cases();  // of many tokens at once, which are among them
std::vector<Case> kept_cases();    // of HARD-KV, which are among them
std::vector<Case> page_cases();    // of PRKV, which are as well

/** Rows (tokens, heads, head_dim) of any type. */
class Tensor {
 public:
  Tensor(DType dtype, int64_t tokens, int64_t heads, int64_t dim, int64_t gap = 0);

  float get(int64_t token, int64_t head, int64_t i) const;
  void set(int64_t token, int64_t head, int64_t i, float x);
  /** All elements, `make()` each. */
  void fill(const std::function<float()>& make);
  TensorView view(Device device, int64_t first, int64_t tokens);
  TensorView view(Device device) { return view(device, 0, tokens); }
  /** The elements of another of the same kind. */
  void take(const Tensor& other);
  /** What lies between rows is as it was. */
  bool gaps_are_clean() const;

  int64_t tokens, heads, dim;

 private:
  const char* at(int64_t token, int64_t head, int64_t i) const;

  DType dtype_;
  int64_t head_stride_, token_stride_;
  std::vector<char> data_;
};

/** What a backend made of a case. */
struct Outcome {
  std::vector<Tensor> outputs;  // of decode steps, then of attend
  std::vector<Tensor> fast;     // of the same attend with Precision::kFast, if the case has one
  std::vector<std::vector<float>> log_sum_exps;
  std::vector<std::vector<float>> errors;
  std::vector<Explanation> explanations;  // per sequence
  // After every step: rows kept, and held; of PRKV the pages that are found, for another query.
  std::vector<std::vector<int64_t>> kept;
  std::vector<std::vector<float>> page_scores;  // of PRKV: after every step, for the same query
  std::vector<Summaries> summaries;
  std::vector<Tensor> rows;        // keys and values that the cache has in the end
  std::vector<std::string> files;  // what the saved ones have in them
  Stats stats;
};

Outcome run(const Case& c, const Config& config);

/** @param is_twin  both ran on the emulator: floats, too, are equal bit for bit */
void compare(const Case& c, const Outcome& expected, const Outcome& actual, bool is_twin);

}  // namespace pariskv::test
