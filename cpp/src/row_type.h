/** How stored numbers are written. No functions: files of one instruction set include this too. */
#pragma once

#include <cstdint>

namespace pariskv {

/** How one number of a stored row is written. */
enum class RowType : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8 };

/** The largest of numbers in 8 bits, without its sign. */
constexpr int32_t kInt8Levels = 127;

}  // namespace pariskv
