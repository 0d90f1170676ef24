#include "pariskv/executor.h"

namespace pariskv {

// Here, so that the library has the one copy of what the class is.
Executor::~Executor() = default;

}  // namespace pariskv
