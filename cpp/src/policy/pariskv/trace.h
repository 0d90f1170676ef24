/** The path of a search by ParisKV, as a backend reports it. */
#pragma once

#include <cstdint>
#include <vector>

namespace pariskv {

struct HeadTrace {
  std::vector<uint8_t> scores;             // (zone)
  std::vector<int32_t> candidates;         // offsets from zone_begin, ascending
  std::vector<std::vector<float>> logits;  // (searchers, candidates) estimated
  std::vector<int32_t> selected;           // indices into candidates, best first
  std::vector<float> worth;                // (selected)
  float mass = 0, error = 0;               // of ParisKVExplanation
};

struct ParisKVTrace {
  std::vector<HeadTrace> heads;  // (heads)
  bool weighed = false;          // their masses and errors are known
};

}  // namespace pariskv
