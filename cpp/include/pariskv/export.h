/** Which names the shared library shows. Everything without a mark stays inside. */
#pragma once

#if defined(__GNUC__)
#define PARISKV_API __attribute__((visibility("default")))
#define PARISKV_LOCAL __attribute__((visibility("hidden")))
#else
#define PARISKV_API
#define PARISKV_LOCAL
#endif
