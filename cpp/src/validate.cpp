#include "validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "pariskv/sizes.h"

namespace pariskv {

namespace {

template <typename Extents>
std::string shape_text(const Extents& extents, size_t rank) {
  std::string text = "(";
  size_t i = 0;
  for (const int64_t extent : extents) {
    if (i == rank) break;
    text += (i++ == 0 ? "" : ", ") + std::to_string(extent);
  }
  return text + (rank == 1 ? ",)" : ")");
}

bool positive(double value) { return std::isfinite(float(value)) && float(value) > 0; }

/** Whether two elements share an address, as in an expanded view. */
bool overlaps(const TensorView& view) {
  // Dimensions by growing step: each step must clear all that the smaller ones reach.
  std::array<bool, TensorView::kMaxRank> done{};
  int64_t reach = 0;
  for (int32_t round = 0; round < view.rank; ++round) {
    int32_t next = -1;
    for (int32_t i = 0; i < view.rank; ++i) {
      if (done[i] || view.shape[i] == 1) continue;
      if (next < 0 || std::abs(view.strides[i]) < std::abs(view.strides[next])) next = i;
    }
    if (next < 0) return false;
    done[next] = true;
    const int64_t step = std::abs(view.strides[next]);
    if (step <= reach) return true;
    reach += step * (view.shape[next] - 1);
  }
  return false;
}

/** Bytes of one row: the elements of the last dimension, which lie side by side. */
struct ByteRange {
  intptr_t begin, end;
  bool operator<(const ByteRange& other) const { return begin < other.begin; }
};

/** All rows of a view, by address. */
std::vector<ByteRange> rows_of(const TensorView& view) {
  const int64_t size = size_of(view.dtype);
  const int64_t row = view.shape[view.rank - 1] * size;
  std::vector<ByteRange> rows{{reinterpret_cast<intptr_t>(view.data), 0}};
  for (int32_t d = 0; d + 1 < view.rank; ++d) {
    std::vector<ByteRange> next;
    for (const ByteRange& at : rows) {
      for (int64_t i = 0; i < view.shape[d]; ++i) {
        next.push_back({intptr_t(at.begin + i * view.strides[d] * size), 0});
      }
    }
    rows = std::move(next);
  }
  for (ByteRange& at : rows) at.end = at.begin + row;
  std::sort(rows.begin(), rows.end());
  return rows;
}

/** From the first to the last byte of a view, whatever lies between its rows. */
ByteRange extent_of(const TensorView& view) {
  const int64_t size = size_of(view.dtype);
  ByteRange range{reinterpret_cast<intptr_t>(view.data), reinterpret_cast<intptr_t>(view.data)};
  for (int32_t d = 0; d < view.rank; ++d) {
    const int64_t reach = (view.shape[d] - 1) * view.strides[d] * size;
    (reach < 0 ? range.begin : range.end) += reach;
  }
  range.end += size;
  return range;
}

/** Whether two views have a byte in common. Their rows are looked at only if they may have. */
bool share_bytes(const TensorView& a, const TensorView& b) {
  if (a.data == nullptr || b.data == nullptr || !(a.device == b.device)) return false;
  if (a.size() == 0 || b.size() == 0) return false;
  const ByteRange all_of_a = extent_of(a), all_of_b = extent_of(b);
  if (all_of_a.end <= all_of_b.begin || all_of_b.end <= all_of_a.begin) return false;
  const std::vector<ByteRange> one = rows_of(a), other = rows_of(b);
  for (size_t i = 0, j = 0; i < one.size() && j < other.size();) {
    if (one[i].begin < other[j].end && other[j].begin < one[i].end) return true;
    one[i].end <= other[j].begin ? ++i : ++j;
  }
  return false;
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.shape == b.shape &&
         a.strides == b.strides;
}

/** "rows 64 to 1023 of sequence 3 were dropped ..." */
std::string dropped_rows(SequenceId sequence, const Positions& dropped) {
  return "rows " + std::to_string(dropped.begin) + " to " + std::to_string(dropped.end - 1) +
         " of sequence " + std::to_string(sequence) +
         " were dropped after others had been chosen to be kept";
}

constexpr const char* kStoresAll = "the policy HardKV with the placement \"host\" stores all rows";

}  // namespace

std::string describe(const TensorView& view) {
  return shape_text(view.shape, size_t(view.rank)) + " " + name_of(view.dtype) + " on " +
         name_of(view.device);
}

void Verb::check_layer(int64_t layer) const {
  if (layer < 0 || layer >= config.layers) {
    fail("[", name, "] layer: expected 0 to ", config.layers - 1, ", got ", layer);
  }
}

void Verb::check_tensor(const char* argument, const TensorView& view, DType dtype,
                        std::initializer_list<int64_t> shape) const {
  bool fits =
      view.rank == int32_t(shape.size()) && view.dtype == dtype && view.device == config.device;
  size_t i = 0;
  for (const int64_t extent : shape) fits = fits && view.shape[i++] == extent;
  if (!fits) {
    fail("[", name, "] ", argument, ": expected ", shape_text(shape, shape.size()), " ",
         name_of(dtype), " on ", name_of(config.device), ", got ", describe(view));
  }
  if (view.size() == 0) return;
  if (view.data == nullptr) fail("[", name, "] ", argument, ": expected data, got a null pointer");
  if (view.shape[view.rank - 1] > 1 && view.strides[view.rank - 1] != 1) {
    fail("[", name, "] ", argument,
         ": expected the elements of a row side by side (last stride 1), got strides ",
         shape_text(view.strides, size_t(view.rank)));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % uintptr_t(size_of(dtype)) != 0) {
    fail("[", name, "] ", argument, ": expected an address aligned to its elements");
  }
}

void Verb::check_output(const char* argument, const TensorView& view, DType dtype,
                        std::initializer_list<int64_t> shape) const {
  check_tensor(argument, view, dtype, shape);
  if (view.size() > 0 && overlaps(view)) {
    fail("[", name, "] ", argument,
         ": expected every element to have its own address, got strides ",
         shape_text(view.strides, size_t(view.rank)));
  }
}

void Verb::check_apart(const char* output, const TensorView& out, const char* argument,
                       const TensorView& view, bool may_be_same) const {
  if (may_be_same && same_view(out, view)) return;
  if (share_bytes(out, view)) {
    fail("[", name, "] ", output, ": expected memory of its own, got some that is part of ",
         argument);
  }
}

void Verb::check_apart(const char* output, const TensorView& out, const RowAddresses& rows) const {
  if (out.data == nullptr) return;
  const BorrowedRows& lent = *config.borrowed;
  const RowFormat format = RowFormat::borrowed(config.head_dim, config.value_dim, lent);
  const auto check = [&](const char* half, const std::vector<const void*>& addresses, int64_t bytes,
                         int64_t stride) {
    for (size_t i = 0; i < addresses.size(); ++i) {
      TensorView row;  // as numbers of 2 bytes, whatever they are
      row.data = const_cast<void*>(addresses[i]);
      row.dtype = DType::kFloat16, row.rank = 2;
      row.shape = {config.kv_heads, bytes / 2}, row.strides = {stride / 2, 1};
      if (!share_bytes(out, row)) continue;
      fail("[", name, "] ", output, ": expected memory of its own, got some that is part of ", half,
           "[", i, "]");
    }
  };
  check("rows.keys", rows.keys, format.key_bytes(), lent.key_head_stride);
  check("rows.values", rows.values, format.value_bytes(), lent.value_head_stride);
}

void Verb::check_borrows(bool addresses) const {
  if (addresses == config.borrowed.has_value()) return;
  if (addresses) {
    fail("[", name,
         "] rows: expected a cache with borrowed rows (Config::borrowed); this one has copies: "
         "prefill, decode and attend take k and v");
  }
  fail("[", name, "] k: expected no tensor, as this cache borrows rows (Config::borrowed): ", name,
       "_rows takes their addresses");
}

void Verb::check_addresses(const RowAddresses& rows, int64_t tokens) const {
  const auto check = [&](const char* half, const std::vector<const void*>& addresses,
                         int64_t alignment) {
    if (int64_t(addresses.size()) != tokens) {
      fail("[", name, "] ", half, ": expected an address for each of the ", tokens, " tokens, got ",
           addresses.size());
    }
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (addresses[i] == nullptr) {
        fail("[", name, "] ", half, "[", i, "]: expected an address, got a null pointer");
      }
      if (reinterpret_cast<uintptr_t>(addresses[i]) % uintptr_t(alignment) == 0) continue;
      fail("[", name, "] ", half, "[", i, "]: expected an address at a multiple of ", alignment,
           " bytes, got one between two");
    }
  };
  check("rows.keys", rows.keys, alignment_of(config.borrowed->key));
  check("rows.values", rows.values, alignment_of(config.borrowed->value));
}

void Verb::check_batch_size(const char* argument, int64_t size, int64_t batch) const {
  if (size != batch) {
    fail("[", name, "] ", argument, ": expected one entry for each of the ", batch,
         " sequences, got ", size);
  }
}

int64_t Verb::check_lengths(const std::vector<int64_t>& lengths, int64_t batch) const {
  check_batch_size("lengths", int64_t(lengths.size()), batch);
  int64_t sum = 0;
  for (const int64_t length : lengths) {
    if (length < 0) fail("[", name, "] lengths: expected 0 or more tokens, got ", length);
    if (length > kMostTokens) {
      fail("[", name, "] lengths: expected at most ", kMostTokens, " tokens, got ", length);
    }
    sum += length;
  }
  return sum;
}

void Verb::check_paged(const std::vector<int64_t>& lengths) const {
  if (std::find(lengths.begin(), lengths.end(), 0) == lengths.end()) return;
  fail("[", name, "] lengths: expected 1 or more with page_rows, got 0");
}

void Verb::check_total(int64_t tokens) const {
  if (tokens > kMostTokens) {
    fail("[", name, "] expected at most ", kMostTokens, " tokens in a sequence, got ", tokens);
  }
}

void Verb::check_stored(SequenceId sequence, const Positions& dropped,
                        const Positions& read) const {
  if (read.end <= dropped.begin || dropped.end <= read.begin) return;
  fail("[", name, "] positions: expected rows that are stored, got ", read.begin, " to ", read.end,
       ", but ", dropped_rows(sequence, dropped), "; ", kStoresAll);
}

void Verb::check_complete(SequenceId sequence, const Positions& dropped,
                          const char* instead) const {
  if (dropped.begin >= dropped.end) return;
  fail("[", name, "] ", instead, ", since ", dropped_rows(sequence, dropped), "; ", kStoresAll);
}

void Verb::refuse_cut(const char* argument, Cut::Counts counts, SequenceId sequence,
                      const Positions& dropped, int64_t total, int64_t kept) const {
  const int64_t least = dropped.end + config.local;  // so that the window has all of its rows
  const std::string stored = dropped_rows(sequence, dropped) + "; " + kStoresAll;
  if (counts == Cut::Counts::kKept) {
    fail("[", name, "] ", argument, ": expected ", least, " tokens or more, or ", dropped.begin,
         " or fewer, got ", kept, ", since ", stored);
  }
  fail("[", name, "] ", argument, ": expected ", total - least, " tokens or fewer, or ",
       total - dropped.begin, " or more, got ", total - kept, ", since ", stored);
}

Logits Verb::check_options(const AttendOptions& options, int64_t tokens) const {
  const double scale = options.scale.value_or(1.0 / std::sqrt(double(config.head_dim)));
  // Checked as the floats they become. A negative scale would turn the search upside down.
  if (!positive(scale)) fail("[", name, "] scale: expected a positive number, got ", scale);
  if (options.softcap != 0 && !positive(options.softcap)) {
    fail("[", name, "] softcap: expected 0 (none) or a positive number, got ", options.softcap);
  }
  if (options.sink_bias) {
    check_tensor("sink_bias", *options.sink_bias, DType::kFloat32, {config.query_heads});
    const auto* bias = static_cast<const float*>(options.sink_bias->data);
    const bool readable = options.sink_bias->device.type == DeviceType::kCpu;
    for (int64_t head = 0; readable && head < config.query_heads; ++head) {
      if (std::isnan(bias[head]) || bias[head] == std::numeric_limits<float>::infinity()) {
        fail("[", name, "] sink_bias: expected numbers, or -inf for none, got ", bias[head],
             " for query head ", head);
      }
    }
  }
  if (options.lse) {
    check_output("lse", *options.lse, DType::kFloat32, {tokens, config.query_heads});
  }
  return {float(scale), float(options.softcap),
          options.sink_bias ? static_cast<const float*>(options.sink_bias->data) : nullptr};
}

TensorView Verb::check_error(const AttendOptions& options, int64_t batch, bool is_estimated) const {
  if (!options.error) return {};
  if (!is_estimated) {
    fail("[", name,
         "] error: expected a policy that estimates its error: ParisKV with tail \"sample\" and "
         "group_rule \"attention_mass\"");
  }
  check_output("error", *options.error, DType::kFloat32, {batch, config.kv_heads});
  return *options.error;
}

void Verb::refuse_decodes_own(const AttendOptions& options) const {
  if (options.error) fail("[", name, "] error: expected none: decode alone writes it");
  if (options.dense || !options.page_rows.empty()) {
    fail("[", name, "] ", options.dense ? "dense" : "page_rows",
         ": expected none; decodes alone leave sequences to other kernels");
  }
}

void Verb::refuse_fast(const AttendOptions& options) const {
  if (options.precision == Precision::kExact) return;
  fail("[", name, "] precision: expected exact: attend alone has another");
}

}  // namespace pariskv
