/** Brings pages into memory by writing to each, with several threads: a system clears them first.
 */
#pragma once

#include <cstdint>

namespace pariskv {

/** Writes a zero to each page. The threads end before this returns. */
void touch_pages(void* data, int64_t bytes);

/** The same by the caller alone. */
void touch_pages_here(void* data, int64_t bytes);

}  // namespace pariskv
