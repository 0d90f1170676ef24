// Exact attention over rows, with a running softmax.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/numerics.h"
#include "cpu/plain/plain.h"
#include "tail_copies.h"

namespace pariskv::cpu::plain {

namespace {

/** Not std::max: a NaN in b survives. */
float larger(float a, float b) { return a > b ? a : b; }

float fold_largest(Lanes lanes) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lanes.value[i] = larger(lanes.value[i], lanes.value[i + half]);
  }
  return lanes.value[0];
}

}  // namespace

void to_float(const void* half, RowType type, int64_t count, float* out) {
  switch (type) {
    case RowType::kFloat32:
      std::memcpy(out, half, size_t(count) * sizeof(float));
      return;
    case RowType::kFloat16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = float16_to_float(static_cast<const uint16_t*>(half)[i]);
      }
      return;
    case RowType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = bfloat16_to_float(static_cast<const uint16_t*>(half)[i]);
      }
      return;
    case RowType::kInt8: {
      float scale;
      std::memcpy(&scale, static_cast<const char*>(half) + count, sizeof scale);
      for (int64_t i = 0; i < count; ++i) {
        out[i] = float(static_cast<const int8_t*>(half)[i]) * scale;
      }
      return;
    }
    case RowType::kQ8_0: {
      for (int64_t i = 0; i < count; ++i) {
        const char* block = static_cast<const char*>(half) + i / kQ8Block * kQ8BlockBytes;
        uint16_t scale;
        std::memcpy(&scale, block, sizeof scale);
        out[i] = float(int8_t(block[2 + i % kQ8Block])) * float16_to_float(scale);
      }
      return;
    }
  }
  no_kernel("type", int64_t(type));
}

void to_int8(const void* half, RowType type, int64_t count, char* out) {
  float numbers[kMaxHeadDim];
  to_float(half, type, count, numbers);
  const float scale = int8_scale(numbers, count);
  for (int64_t i = 0; i < count; ++i) out[i] = char(float_to_int8(numbers[i], scale));
  std::memcpy(out + count, &scale, sizeof scale);
}

uint32_t affine(const float* x, const float* factor, const float* added, int64_t count,
                float* out) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = pariskv::affine(x[i], factor[i], added[i]);
    largest = std::max(largest, bits_of(out[i]) & 0x7fffffffu);
  }
  return largest;
}

float sum_exp(const float* x, int64_t count, float shift) {
  Lanes lanes;
  for (int64_t i = 0; i < count; ++i) {
    lanes.value[i % 16] = lanes.value[i % 16] + exp(x[i] - shift);
  }
  return lanes.fold();
}

void add_exp(const float* x, int64_t count, float shift, float* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] = sums[i] + exp(x[i] - shift);
}

void attend(const AttendRun& run) {
  const int64_t key_dim = run.key_dim, value_dim = run.value_dim;
  for (int64_t begin = 0; begin < run.count; begin += kAttendTile) {
    const int64_t end = std::min(begin + kAttendTile, run.count);
    for (int64_t q = 0; q < run.queries; ++q) {
      const int64_t visible = std::min(run.limits[q], end) - begin;
      if (visible <= 0) continue;

      float weights[kAttendTile];
      Lanes largest;
      std::fill_n(largest.value, 16, -INFINITY);
      for (int64_t r = 0; r < visible; ++r) {
        to_float(run.keys[begin + r], run.key_type, key_dim, run.scratch);
        float logit = dot(run.query + q * key_dim, run.scratch, key_dim) * run.scale;
        if (run.shift != nullptr) logit = logit + run.shift[q];
        if (run.softcap > 0) logit = run.softcap * std::tanh(logit / run.softcap);
        weights[r] = logit;
        largest.value[r % 16] = larger(largest.value[r % 16], logit);
      }
      const float top = larger(run.maximum[q], fold_largest(largest));

      const float keep = exp(run.maximum[q] - top);
      Lanes total, squares;
      for (int64_t r = 0; r < visible; ++r) {
        weights[r] = exp(weights[r] - top);
        total.value[r % 16] = total.value[r % 16] + weights[r];
        squares.value[r % 16] = std::fma(weights[r], weights[r], squares.value[r % 16]);
      }
      run.maximum[q] = top;
      run.sum[q] = std::fma(run.sum[q], keep, total.fold());
      if (run.squares != nullptr) {
        run.squares[q] = std::fma(run.squares[q], keep * keep, squares.fold());
      }

      float* weighted = run.weighted + q * value_dim;
      for (int64_t d = 0; d < value_dim; ++d) weighted[d] = weighted[d] * keep;
      for (int64_t r = 0; r < visible; ++r) {
        to_float(run.values[begin + r], run.value_type, value_dim, run.scratch);
        for (int64_t d = 0; d < value_dim; ++d) {
          weighted[d] = std::fma(weights[r], run.scratch[d], weighted[d]);
        }
      }
    }
  }
}

}  // namespace pariskv::cpu::plain
