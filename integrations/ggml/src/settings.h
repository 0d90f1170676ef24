/** What a user may set, in the variable PARISKV_GGML or in a file that it names. */
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pariskv::ggml {

/** Settings::from where none is set and the shape of the heads is not known, or large. */
constexpr int64_t kLeastFrom = 4096;

struct Settings {
  bool on = true;
  /**
   * Cells of a KV cache that a step looks at, from which on the steps are ours; none: from where on
   * they are likely to be quicker than the host's, see Geometry::pays_from.
   */
  std::optional<int64_t> from;
  int64_t top_k = 100;           ///< As pariskv::ParisKV::top_k.
  std::optional<double> error;   ///< As pariskv::ParisKV::error.
  int64_t tail_rows = 512;       ///< As pariskv::ParisKV::tail_rows.
  std::optional<uint64_t> seed;  ///< As pariskv::ParisKV::seed; none: a secret.
  int64_t local = -1;            ///< As pariskv::Config::local.
  int64_t dense_below = -1;      ///< As pariskv::Config::dense_below.
  int64_t most_tokens = 16;      ///< Of a step, over all sequences; prompts are the host's.
  int64_t memory = 0;            ///< As pariskv::Config::memory_budget, in MiB; 0: no limit.
  bool check = false;            ///< The host computes each step too, and both are compared.
};

/**
 * @param text  "name=value, ...", or "@" and the path of a file with lines of that kind
 * Throws std::invalid_argument with a sentence.
 */
Settings read_settings(const std::string& text);

}  // namespace pariskv::ggml
