/** XXH64 with seed 0, by its public specification: the checksum of each piece of a saved file. */
#pragma once

#include <cstdint>

namespace pariskv {

uint64_t checksum_of(const void* data, int64_t bytes);

}  // namespace pariskv
