/** The rows that HARD-KV keeps of a zone, as a backend reports them. */
#pragma once

#include <cstdint>
#include <vector>

namespace pariskv {

struct HardKVTrace {
  std::vector<std::vector<int32_t>> kept;  // (heads) positions that are attended to
  std::vector<std::vector<int32_t>> held;  // (heads) positions that may come back
};

}  // namespace pariskv
