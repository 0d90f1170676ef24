/**
 * From a size or a type that is known at run time to code that is compiled for it. Arguments are
 * checked by then, so one that is not in the list is our bug: it throws InternalError.
 */
#pragma once

#include <string>
#include <type_traits>

#include "pariskv/error.h"
#include "pariskv/sizes.h"
#include "pariskv/tensor_view.h"

namespace pariskv {

/** visit(Constant<size>{}), for one of the list. */
template <int64_t kFirst, int64_t... kRest, typename Visit>
auto dispatch(Sizes<kFirst, kRest...>, int64_t size, Visit&& visit) {
  if (size == kFirst) return visit(Constant<kFirst>{});
  if constexpr (sizeof...(kRest) > 0) {
    return dispatch(Sizes<kRest...>{}, size, visit);
  } else {
    throw InternalError("pariskv has no code for the size " + std::to_string(size));
  }
}

/** visit(std::integral_constant<DType, dtype>{}) */
template <typename Visit>
auto dispatch(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kFloat16:
      return visit(std::integral_constant<DType, DType::kFloat16>{});
    case DType::kBFloat16:
      return visit(std::integral_constant<DType, DType::kBFloat16>{});
  }
  throw InternalError("pariskv has no code for the type " + std::to_string(int(dtype)));
}

template <int64_t... kSizes>
constexpr bool contains(Sizes<kSizes...>, int64_t size) {
  return ((size == kSizes) || ...);
}

/** The first of a rising list that is not less than `size`; the list's last one if all are. */
template <int64_t... kSizes>
constexpr int64_t least_of(Sizes<kSizes...>, int64_t size) {
  int64_t least = 0;
  ((least = least >= size && least > 0 ? least : kSizes), ...);
  return least;
}

/** "64, 128 or 256" */
template <int64_t... kSizes>
std::string text_of(Sizes<kSizes...>) {
  std::string text;
  size_t left = sizeof...(kSizes);
  const auto append = [&](int64_t size) {
    text += std::to_string(size) + (left > 2 ? ", " : left == 2 ? " or " : "");
    --left;
  };
  (append(kSizes), ...);
  return text;
}

}  // namespace pariskv
