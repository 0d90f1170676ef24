/** The version of the headers as macros, and that of the library as a call. C reads this too. */
#pragma once

#include "pariskv/export.h"

#define PARISKV_VERSION_MAJOR 0
#define PARISKV_VERSION_MINOR 1
#define PARISKV_VERSION_PATCH 0
#define PARISKV_VERSION_STRING "0.1.0"

#ifdef __cplusplus
namespace pariskv {

/** "0.1.0", say: of the library that is loaded. The macros are of the headers. */
PARISKV_API const char* version();

}  // namespace pariskv
#endif
