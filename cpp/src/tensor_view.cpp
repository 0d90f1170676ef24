#include "pariskv/tensor_view.h"

#include "check.h"

namespace pariskv {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape,
                                  Device device) {
  if (shape.size() > kMaxRank) {
    fail("[tensor] shape: expected at most ", kMaxRank, " dimensions, got ", shape.size());
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = int32_t(shape.size());
  int32_t i = 0;
  for (const int64_t extent : shape) view.shape[i++] = extent;
  int64_t stride = 1;
  for (i = view.rank - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

int64_t TensorView::size() const {
  int64_t size = 1;
  for (int32_t i = 0; i < rank; ++i) size *= shape[i];
  return size;
}

}  // namespace pariskv
