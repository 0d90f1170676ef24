/** How stored numbers are written. No functions: files of one instruction set include this too. */
#pragma once

#include <cstdint>

namespace pariskv {

/** How one number of a stored row is written. */
enum class RowType : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kQ8_0 };

/** The largest of numbers in 8 bits, without its sign. */
constexpr int32_t kInt8Levels = 127;

/** ggml's q8_0: blocks of 32 numbers of 8 bits behind the float16 that they are multiplied by. */
constexpr int64_t kQ8Block = 32;
constexpr int64_t kQ8BlockBytes = 2 + kQ8Block;

}  // namespace pariskv
