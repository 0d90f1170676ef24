#include "c/tensors.h"

#include <algorithm>

#include "c/status.h"
#include "c/structs.h"

namespace pariskv::c {

namespace {

// Beyond these no memory is; within them sums of products of sizes fit 64 bits.
constexpr int64_t kMostExtent = int64_t{1} << 40;
constexpr int64_t kMostReach = int64_t{1} << 56;

std::string at(const std::string& where, const char* field, int32_t i) {
  return where + "." + field + "[" + std::to_string(i) + "]";
}

DType dtype_of(const std::string& where, int32_t dtype) {
  return enum_of<DType>(where + ".dtype", dtype, {"float32", "float16", "bfloat16"});
}

void check_rank(const std::string& where, int32_t rank) {
  if (rank < 0 || rank > TensorView::kMaxRank) {
    fail(where, ".rank: expected 0 to ", TensorView::kMaxRank, " dimensions, got ", rank);
  }
}

void check_extent(const std::string& where, int32_t i, int64_t extent) {
  if (extent < 0 || extent > kMostExtent) {
    fail(at(where, "shape", i), ": expected 0 to ", kMostExtent, ", got ", extent);
  }
}

std::optional<double> scale_of(double scale) {
  return scale == 0 ? std::nullopt : std::optional<double>(scale);
}

std::optional<TensorView> view_or_none(const char* verb, const char* argument,
                                       const pariskv_tensor* given) {
  if (given == nullptr) return std::nullopt;
  return view_of(verb, argument, given);
}

std::string where_of(const char* verb, const char* argument) {
  return "[" + std::string(verb) + "] " + argument;
}

}  // namespace

TensorView view_of(const char* verb, const char* argument, const pariskv_tensor* given) {
  const std::string where = where_of(verb, argument);
  const pariskv_tensor tensor = taken(where, given);
  TensorView view;
  view.data = tensor.data;
  view.dtype = dtype_of(where, tensor.dtype);
  view.device.type = enum_of<DeviceType>(where + ".device", tensor.device, {"cpu", "cuda"});
  view.device.index = tensor.device_index;
  check_rank(where, tensor.rank);
  view.rank = tensor.rank;
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const int64_t extent = tensor.shape[i], stride = tensor.strides[i];
    check_extent(where, i, extent);
    const int64_t most = kMostReach / std::max<int64_t>(extent, 1);
    if (stride < -most || stride > most) {
      fail(at(where, "strides", i), ": expected at most ", most, " elements either way for ",
           extent, " rows, got ", stride);
    }
    view.shape[size_t(i)] = extent;
    view.strides[size_t(i)] = stride;
  }
  return view;
}

namespace {

std::vector<int64_t> rows_of(int64_t batch, const int64_t* rows) {
  if (rows == nullptr) return {};
  return {rows, rows + batch};
}

}  // namespace

AttendOptions options_of(const char* verb, int64_t batch, const pariskv_attend_options* given) {
  AttendOptions options;
  if (given == nullptr) return options;
  const pariskv_attend_options asked = taken(where_of(verb, "options"), given);
  options.scale = scale_of(asked.scale);
  options.softcap = asked.softcap;
  options.sink_bias = view_or_none(verb, "options.sink_bias", asked.sink_bias);
  options.lse = view_or_none(verb, "options.lse", asked.lse);
  options.error = view_or_none(verb, "options.error", asked.error);
  options.precision = enum_of<Precision>(where_of(verb, "options") + ".precision", asked.precision,
                                         {"exact", "fast"});
  if (asked.reserved != 0) {
    fail(where_of(verb, "options"), ".reserved: expected 0, got ", asked.reserved);
  }
  if (asked.dense != nullptr) {
    options.dense = [call = asked.dense, context = asked.dense_context] { call(context); };
  }
  options.page_rows = rows_of(batch, asked.page_rows);
  return options;
}

PrefillOptions options_of(const char* verb, int64_t batch, const pariskv_prefill_options* given) {
  PrefillOptions options;
  if (given == nullptr) return options;
  const pariskv_prefill_options asked = taken(where_of(verb, "options"), given);
  options.q = view_or_none(verb, "options.q", asked.q);
  options.scale = scale_of(asked.scale);
  options.softcap = asked.softcap;
  options.page_rows = rows_of(batch, asked.page_rows);
  return options;
}

int32_t* unserved_of(const pariskv_prefill_options* given) {
  return given == nullptr ? nullptr : taken("[prefill] options", given).unserved;
}

pariskv_tensor tensor_of(const TensorView& view) {
  pariskv_tensor tensor{};
  tensor.size = sizeof tensor;
  tensor.data = view.data, tensor.dtype = int32_t(view.dtype), tensor.rank = view.rank;
  tensor.device = int32_t(view.device.type), tensor.device_index = view.device.index;
  for (int d = 0; d < view.rank; ++d) {
    tensor.shape[d] = view.shape[size_t(d)], tensor.strides[d] = view.strides[size_t(d)];
  }
  return tensor;
}

bool brings_rows(const char* verb, const pariskv_tensor* k, const pariskv_tensor* v) {
  if ((k == nullptr) != (v == nullptr)) {
    fail("[", verb, "] ", k == nullptr ? "k" : "v",
         ": expected keys and values, or neither of them; got a null pointer beside the other");
  }
  return k != nullptr;
}

}  // namespace pariskv::c

pariskv_status pariskv_tensor_init(pariskv_tensor* tensor, size_t size, void* data, int32_t dtype,
                                   int32_t rank, const int64_t* shape) {
  using namespace pariskv::c;
  return answer([&] {
    const std::string where = "[tensor_init] tensor";
    pariskv_tensor own{};
    own.data = data;
    own.dtype = int32_t(dtype_of(where, dtype));
    check_rank(where, rank);
    if (shape == nullptr && rank > 0) {
      pariskv::fail("[tensor_init] shape: expected ", rank, " sizes, got a null pointer");
    }
    own.rank = rank;
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; --i) {
      check_extent(where, i, shape[i]);
      own.shape[i] = shape[i];
      own.strides[i] = stride;
      if (stride > kMostReach / std::max<int64_t>(shape[i], 1)) {
        pariskv::fail("[tensor_init] shape: expected at most ", kMostReach, " elements");
      }
      stride *= std::max<int64_t>(shape[i], 1);
    }
    fill(where, tensor, size, own);
  });
}
