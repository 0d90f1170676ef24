/** What the arena knows of the process heap besides its being a MemoryResource. */
#pragma once

#include <cstddef>

#include "pariskv/memory.h"

namespace pariskv {

/**
 * Whether a block goes back to the system when it is freed. Nobody can read it from then on, so
 * it need not be zeroed: that would bring in every page that was never written.
 */
bool goes_to_the_system(const MemoryResource& resource, std::size_t bytes, std::size_t alignment);

/**
 * Zeroes a part of such a block. Whole pages are given back to the system where it can be asked
 * for that, since writing zeros would first bring in those that nobody has written to.
 */
void zero_mapped(void* data, std::size_t bytes);

}  // namespace pariskv
