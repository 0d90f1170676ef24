/** Which process this is: after fork(2) a thread exists in the parent alone. */
#pragma once

#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace pariskv {

inline int64_t this_process() {
#if defined(__unix__) || defined(__APPLE__)
  return int64_t(getpid());
#else
  return 0;
#endif
}

}  // namespace pariskv
