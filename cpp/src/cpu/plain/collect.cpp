// Compaction: which keys passed the threshold, in index order.
#include "cpu/plain/plain.h"

namespace pariskv::cpu::plain {

int64_t collect(const uint8_t* scores, int64_t count, uint8_t threshold, int64_t* ties,
                int32_t base, int32_t* out) {
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool tie = scores[i] == threshold && *ties > 0;
    if (tie) --*ties;
    if (tie || scores[i] > threshold) out[written++] = base + int32_t(i);
  }
  return written;
}

}  // namespace pariskv::cpu::plain
