#include "cpu/narrow_rows.h"

#include <cmath>
#include <cstring>

namespace pariskv::cpu {

namespace {

constexpr float kNothing[kMaxHeadDim] = {};

/** The scale of a half, behind its `dim` numbers. */
float scale_of(const char* half, int64_t dim) {
  float scale;
  std::memcpy(&scale, half + dim, sizeof scale);
  return scale;
}

}  // namespace

void NarrowRows::enter(int64_t position, bool to_write) {
  const int64_t block = position / base_.layout.block;
  if (block == block_ && to_write == to_write_) return;
  block_ = block, to_write_ = to_write;
  const int64_t tokens = shape_.segment_tokens;
  const NarrowBase::Mean mean =
      base_.mean(sequence_.summaries[position / tokens], position % tokens);
  for (int64_t d = 0; d < shape_.rows.key_dim; ++d) {
    const float base = base_.of_key(mean, d);
    added_[d] = to_write ? base_.of_key_left(d, base).added : base_.of_key_back(d, base).added;
  }
}

void NarrowRows::read_key(int64_t position, float* out) {
  const int64_t dim = shape_.rows.key_dim;
  const char* key = place(position).key;
  kernels_.to_float(key, shape_.narrow.key, dim, out);
  if (!based()) return;
  const bool bare = std::signbit(scale_of(key, dim));
  if (bare) {
    for (int64_t d = 0; d < dim; ++d) out[d] = -out[d];
  } else {
    enter(position, false);
  }
  kernels_.affine(out, base_.stretch(), bare ? kNothing : added_, dim, out);
}

void NarrowRows::read_value(int64_t position, float* out) {
  const int64_t dim = shape_.rows.value_dim;
  kernels_.to_float(place(position).value, shape_.narrow.value, dim, out);
  if (based()) kernels_.affine(out, base_.values().unit, base_.values().centre, dim, out);
}

void NarrowRows::write(const RowPlace& from, int64_t position) {
  const RowPlace to = place(position);
  if (!based()) return convert_row(kernels_, from, shape_.rows, to, shape_.narrow);
  const int64_t key_dim = shape_.rows.key_dim, value_dim = shape_.rows.value_dim;
  enter(position, true);
  float x[kMaxHeadDim], whole[kMaxHeadDim], left[kMaxHeadDim];
  kernels_.to_float(from.key, shape_.rows.key, key_dim, x);
  const uint32_t before = kernels_.affine(x, base_.gain(), kNothing, key_dim, whole);
  const bool bare = before < kernels_.affine(x, base_.gain(), added_, key_dim, left);
  kernels_.to_int8(bare ? whole : left, RowType::kFloat32, key_dim, to.key);
  if (bare) {
    const float scale = -scale_of(to.key, key_dim);
    std::memcpy(to.key + key_dim, &scale, sizeof scale);
  }
  for (int64_t d = 0; !has_values_ && d < value_dim; ++d) {
    const NarrowBase::Way way = base_.of_value_left(d);
    value_factor_[d] = way.factor, value_added_[d] = way.added;
  }
  has_values_ = true;
  kernels_.to_float(from.value, shape_.rows.value, value_dim, x);
  kernels_.affine(x, value_factor_, value_added_, value_dim, left);
  kernels_.to_int8(left, RowType::kFloat32, value_dim, to.value);
}

void NarrowRows::read(int64_t position, const RowPlace& out) {
  const RowType type = row_type(shape_.dtype);
  float x[kMaxHeadDim];
  read_key(position, x);
  write_half(x, shape_.rows.key_dim, type, out.key);
  read_value(position, x);
  write_half(x, shape_.rows.value_dim, type, out.value);
}

void read_row(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
              int64_t head, int64_t position, const RowPlace& out) {
  if (sequence.narrow(position)) {
    return NarrowRows(kernels, shape, sequence, head).read(position, out);
  }
  const RowFormat wanted = RowFormat::plain(shape.rows.key_dim, shape.rows.value_dim, shape.dtype);
  convert_row(kernels, plain_row_at(shape, sequence, head, position), shape.rows, out, wanted);
}

void read_key_at(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
                 int64_t head, int64_t position, float* out) {
  if (!sequence.narrow(position)) {
    return read_key(kernels, shape.rows, plain_row_at(shape, sequence, head, position).key, out);
  }
  NarrowRows(kernels, shape, sequence, head).read_key(position, out);
}

}  // namespace pariskv::cpu
