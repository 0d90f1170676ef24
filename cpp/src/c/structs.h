/**
 * Structs that carry their size. A program may be older than the library: its structs are shorter,
 * and end where those of some earlier version did.
 */
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "check.h"
#include "pariskv/c_types.h"
#include "pariskv/version.h"

namespace pariskv::c {

/** A struct's name, and its bytes in the first version that had it. */
template <typename Struct>
struct About;

#define PKV_ABOUT(type, bytes)                    \
  template <>                                     \
  struct About<type> {                            \
    static constexpr const char* kName = #type;   \
    static constexpr size_t kFirst = bytes;       \
    static_assert(sizeof(type) >= kFirst, #type); \
  }

PKV_ABOUT(pariskv_tensor, 96);
PKV_ABOUT(pariskv_policy_pariskv, 88);
PKV_ABOUT(pariskv_policy_hardkv, 56);
PKV_ABOUT(pariskv_policy_prkv, 40);
PKV_ABOUT(pariskv_borrowed_rows, 32);
PKV_ABOUT(pariskv_config, 176);
PKV_ABOUT(pariskv_memory, 32);
PKV_ABOUT(pariskv_executor, 24);
PKV_ABOUT(pariskv_resources, 56);
PKV_ABOUT(pariskv_attend_options, 48);
PKV_ABOUT(pariskv_prefill_options, 32);
PKV_ABOUT(pariskv_bytes, 24);
PKV_ABOUT(pariskv_region_counts, 48);
PKV_ABOUT(pariskv_stats, 248);
PKV_ABOUT(pariskv_pages, 200);
PKV_ABOUT(pariskv_page_table, 40);

#undef PKV_ABOUT

/** Throws unless `size` is that of this struct, now or in an earlier version. */
template <typename Struct>
void check_size(const std::string& where, size_t size) {
  constexpr const char* kName = About<Struct>::kName;
  if (size > sizeof(Struct)) {
    fail(where, ": expected at most ", sizeof(Struct), ", sizeof(", kName, ") in the library ",
         PARISKV_VERSION_STRING, ", got ", size,
         ": not set, or by a program that was compiled with newer headers");
  }
  if (size < About<Struct>::kFirst || size % alignof(Struct) != 0) {
    fail(where, ": expected ", sizeof(Struct), ", sizeof(", kName, "), got ", size,
         ": set it before the call, or by the struct's init call");
  }
}

/** Throws unless there is something at a pointer that a struct could be. */
template <typename Struct>
void check_pointer(const std::string& where, const Struct* given) {
  if (given == nullptr) {
    fail(where, ": expected a ", About<Struct>::kName, ", got a null pointer");
  }
  if (reinterpret_cast<uintptr_t>(given) % alignof(Struct) != 0) {
    fail(where, ": expected a ", About<Struct>::kName, " at a multiple of ", alignof(Struct),
         " bytes, got an address between two");
  }
}

/**
 * A struct of the program, as long as the library's own.
 * @param where    "[verb] argument"
 * @param missing  what an older program could not say
 */
template <typename Struct>
Struct taken(const std::string& where, const Struct* given, const Struct& missing = {}) {
  check_pointer(where, given);
  check_size<Struct>(where + ".size", given->size);
  Struct own = missing;
  std::memcpy(&own, given, given->size);
  return own;
}

/** Throws unless `handed` may write to the struct. */
template <typename Struct>
void check_place(const std::string& where, const Struct* place) {
  check_pointer(where, place);
  check_size<Struct>(where + ".size", place->size);
}

/** Writes as much of a struct as the program knows of. */
template <typename Struct>
void hand_out(Struct* place, Struct own) {
  const size_t size = place->size;
  own.size = size;
  std::memcpy(place, &own, size);
}

/** The same for an init call, where the size is not yet in the struct. */
template <typename Struct>
void fill(const std::string& where, Struct* place, size_t size, Struct own) {
  check_pointer(where, place);
  check_size<Struct>(where + ".size", size);
  own.size = size;
  std::memcpy(place, &own, size);
}

/** An enumeration that came as a number; `names` are those of 0, 1 and so on. */
template <typename Enum>
Enum enum_of(const std::string& where, int32_t value, std::initializer_list<const char*> names) {
  if (value >= 0 && size_t(value) < names.size()) return Enum(value);
  std::string expected;
  int32_t i = 0;
  for (const char* name : names) {
    expected += (i == 0 ? "" : ", ") + std::to_string(i) + " (" + name + ")";
    ++i;
  }
  fail(where, ": expected one of ", expected, ", got ", value);
}

/** Throws unless there is a place for a result. */
inline void check_result(const char* verb, const char* argument, const void* place) {
  if (place == nullptr) {
    fail("[", verb, "] ", argument, ": expected a place for the result, got a null pointer");
  }
}

}  // namespace pariskv::c
