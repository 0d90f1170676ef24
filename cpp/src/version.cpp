#include "pariskv/version.h"

namespace pariskv {

const char* version() { return PARISKV_VERSION_STRING; }

}  // namespace pariskv
