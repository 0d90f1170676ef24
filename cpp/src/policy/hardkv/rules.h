/** The constants of a decode by HARD-KV: they never change in the life of a cache. */
#pragma once

#include <cstdint>

namespace pariskv {

struct HardKVRules {
  int64_t most, least;  // rows that a choice keeps per kv head
  uint32_t p;           // of the attention, see observe.h; 2^kTopPBits: of any number, `most`
  int64_t pool;         // neighbours whose largest logit ranks a row; 1: its own does
  int64_t patience;     // choices that a row may lose before it is forgotten
};

}  // namespace pariskv
