/** Sizes of the launches of a choice. */
#pragma once

#include <cstdint>

#include "dispatch.h"

namespace pariskv::cuda {

inline unsigned pieces(int64_t count, int64_t size) { return unsigned((count + size - 1) / size); }

/** Calls visit(Constant<chunks>{}) for as many times 128 channels as a key has. */
template <typename Visit>
void dispatch_chunks(int64_t key_dim, Visit visit) {
  dispatch(Sizes<1, 2, 4>{}, least_of(Sizes<1, 2, 4>{}, (key_dim + 127) / 128), visit);
}

/** Cuts arrays from the scratch of a kv head. */
inline void take_scratch(int64_t& at, int64_t& all, int64_t bytes) {
  at = all;
  all += (bytes + 255) / 256 * 256;
}

}  // namespace pariskv::cuda
