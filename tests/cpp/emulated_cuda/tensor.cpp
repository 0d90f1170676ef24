// Rows of any type, with gaps between them.
#include <algorithm>
#include <cstring>

#include "cases.h"

namespace pariskv::test {

namespace {

constexpr char kGap = 0x5a;

uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float of_bfloat16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace

Tensor::Tensor(DType dtype, int64_t tokens, int64_t heads, int64_t dim, int64_t gap)
    : tokens(tokens),
      heads(heads),
      dim(dim),
      dtype_(dtype),
      head_stride_(dim + gap),
      token_stride_(head_stride_ * heads + 3 * gap),
      data_(size_t((tokens * token_stride_) * size_of(dtype)), kGap) {}

const char* Tensor::at(int64_t token, int64_t head, int64_t i) const {
  return data_.data() + (token * token_stride_ + head * head_stride_ + i) * size_of(dtype_);
}
float Tensor::get(int64_t token, int64_t head, int64_t i) const {
  float x;
  uint16_t half;
  _Float16 float16;
  std::memcpy(&half, at(token, head, i), 2);
  std::memcpy(&float16, &half, 2);
  if (dtype_ == DType::kFloat16) return float(float16);
  if (dtype_ == DType::kBFloat16) return of_bfloat16(half);
  std::memcpy(&x, at(token, head, i), 4);
  return x;
}
void Tensor::set(int64_t token, int64_t head, int64_t i, float x) {
  char* place = data_.data() + (at(token, head, i) - data_.data());
  const auto float16 = _Float16(x);
  const uint16_t bfloat16 = bfloat16_of(x);
  if (dtype_ == DType::kFloat32) std::memcpy(place, &x, 4);
  if (dtype_ == DType::kFloat16) std::memcpy(place, &float16, 2);
  if (dtype_ == DType::kBFloat16) std::memcpy(place, &bfloat16, 2);
}
void Tensor::fill(const std::function<float()>& make) {
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) set(i, h, d, make());
    }
  }
}
void Tensor::take(const Tensor& other) {
  std::copy(other.data_.begin(), other.data_.end(), data_.begin());
}
TensorView Tensor::view(Device device, int64_t first, int64_t count) {
  char* data = data_.data() + first * token_stride_ * size_of(dtype_);
  TensorView view = TensorView::contiguous(data, dtype_, {count, heads, dim}, device);
  view.strides = {token_stride_, head_stride_, 1};
  return view;
}
bool Tensor::gaps_are_clean() const {
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const char* next = h + 1 < heads ? at(i, h + 1, 0) : at(i + 1, 0, 0);
      const bool clean = std::all_of(at(i, h, dim), next, [](char byte) { return byte == kGap; });
      if (!clean) return false;
    }
  }
  return true;
}

}  // namespace pariskv::test
