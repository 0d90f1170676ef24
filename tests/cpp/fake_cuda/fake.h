/** What the fake CUDA and its tests share. */
#pragma once

#include <cstdint>
#include <string>

#include "runtime.h"

namespace pariskv::test {

/** The one stream that is always being captured: a decode on it is like a replay. */
inline const cudaStream_t kCapturedStream = reinterpret_cast<cudaStream_t>(7);

/** What the fake kernels found wrong first; empty: nothing. */
std::string& wrong();

/** Pieces of pinned memory that this thread has asked for. */
int64_t& pinned_by_me();

}  // namespace pariskv::test
