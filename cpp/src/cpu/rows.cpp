#include "cpu/rows.h"

#include <algorithm>
#include <cstring>

#include "cpu/numerics.h"

namespace pariskv::cpu {

void copy_row(const RowFormat& rows, const RowPlace& from, const RowPlace& to) {
  std::memcpy(to.key, from.key, size_t(rows.key_bytes()));
  std::memcpy(to.value, from.value, size_t(rows.value_bytes()));
}

namespace {

/** One block of q8_0. Of numbers that are not finite, or too large for a float16, none is. */
void write_q8_block(const float* numbers, int64_t count, char* block) {
  const uint16_t bits = float_to_float16(int8_scale(numbers, count));
  const float scale = float16_to_float(bits);
  std::memcpy(block, &bits, sizeof bits);
  for (int64_t i = 0; i < kQ8Block; ++i) {
    block[sizeof bits + size_t(i)] = i < count ? char(float_to_int8(numbers[i], scale)) : char(0);
  }
}

}  // namespace

void write_half(const float* numbers, int64_t dim, RowType type, char* half) {
  switch (type) {
    case RowType::kFloat32:
      std::memcpy(half, numbers, size_t(dim) * sizeof(float));
      return;
    case RowType::kFloat16:
      for (int64_t d = 0; d < dim; ++d) {
        reinterpret_cast<uint16_t*>(half)[d] = float_to_float16(numbers[d]);
      }
      return;
    case RowType::kBFloat16:
      for (int64_t d = 0; d < dim; ++d) {
        reinterpret_cast<uint16_t*>(half)[d] = float_to_bfloat16(numbers[d]);
      }
      return;
    case RowType::kInt8:
      plain_kernels().to_int8(numbers, RowType::kFloat32, dim, half);
      return;
    case RowType::kQ8_0:
      for (int64_t d = 0; d < dim; d += kQ8Block, half += kQ8BlockBytes) {
        write_q8_block(numbers + d, std::min(kQ8Block, dim - d), half);
      }
      return;
  }
  no_kernel("type", int64_t(type));
}

void convert_half(const Kernels& kernels, int64_t dim, const HalfPlace& from, const HalfPlace& to) {
  if (from.type == to.type) {
    std::memcpy(to.half, from.half, size_t(half_bytes(to.type, dim)));
    return;
  }
  if (to.type == RowType::kInt8) {  // as all rows of a prompt are written
    kernels.to_int8(from.half, from.type, dim, to.half);
    return;
  }
  float numbers[kMaxHeadDim];
  kernels.to_float(from.half, from.type, dim, numbers);
  write_half(numbers, dim, to.type, to.half);
}

void convert_row(const Kernels& kernels, const RowPlace& from, const RowFormat& from_format,
                 const RowPlace& to, const RowFormat& to_format) {
  convert_half(kernels, from_format.key_dim, {from.key, from_format.key}, {to.key, to_format.key});
  convert_half(kernels, from_format.value_dim, {from.value, from_format.value},
               {to.value, to_format.value});
}

}  // namespace pariskv::cpu
