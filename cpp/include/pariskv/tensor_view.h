/**
 * Non-owning views: how tensors come in and go out.
 *
 *   float q[2][32][128];
 *   auto view = pariskv::TensorView::contiguous(q, pariskv::DType::kFloat32, {2, 32, 128});
 */
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "pariskv/export.h"

namespace pariskv {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

/** Bytes of one element. */
constexpr int64_t size_of(DType dtype) {
  switch (dtype) {  // no default: a new type is a warning here
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
  }
  return 0;
}

/** "float32", "float16" or "bfloat16". */
PARISKV_API const char* name_of(DType dtype);

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  bool operator==(const Device& other) const {
    return type == other.type && (type == DeviceType::kCpu || index == other.index);
  }
};

/**
 * A strided window on memory of the caller. It must outlive the call it is
 * passed to, and no longer.
 */
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  ///< In elements; the last one must be 1.

  /** A row-major view of `data`, whose dimensions are `shape`. */
  PARISKV_API static TensorView contiguous(void* data, DType dtype,
                                           std::initializer_list<int64_t> shape,
                                           Device device = {});

  /** Elements in the view, strides left aside. */
  PARISKV_API int64_t size() const;
};

}  // namespace pariskv
