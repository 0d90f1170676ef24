/** The common part of some rows of a head, K or V, on the CPU: see tail_copies.h. */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/numerics.h"
#include "cpu/simd/kernels.h"
#include "tail_copies.h"

namespace pariskv::cpu {

/** Some halves of rows: read(i, out) writes number i as `dim` floats. */
template <typename Read>
struct Halves {
  int64_t dim;
  Read read;

  /** See loudness_of. */
  int loudness(int64_t i) const {
    float x[kMaxHeadDim], largest = 0;
    read(i, x);
    for (int64_t d = 0; d < dim; ++d) {
      if (std::isfinite(x[d])) largest = std::max(largest, std::fabs(x[d]));
    }
    return loudness_of(bits_of(largest));
  }

  /** Sets the common part of the first `count` of them, at most kMostCommonRows. */
  void set_common(int64_t count, const CommonPart& common) const {
    uint8_t loud[kMostCommonRows], sorted_rows[kMostCommonRows];
    for (int64_t i = 0; i < count; ++i) loud[i] = uint8_t(loudness(i));
    std::copy_n(loud, count, sorted_rows);
    std::nth_element(sorted_rows, sorted_rows + count / 2, sorted_rows + count);
    const int median = count > 0 ? sorted_rows[count / 2] : 0;
    double sums[kMaxHeadDim] = {}, squares[kMaxHeadDim] = {};
    int64_t counts[kMaxHeadDim] = {};
    for (int64_t strand = 0; strand < kCommonStrands; ++strand) {
      double own_sums[kMaxHeadDim] = {}, own_squares[kMaxHeadDim] = {};
      for (int64_t i = strand; i < count; i += kCommonStrands) {
        if (!is_common(loud[i], median)) continue;
        float x[kMaxHeadDim];
        read(i, x);
        for (int64_t d = 0; d < dim; ++d) {
          if (!std::isfinite(x[d])) continue;
          own_sums[d] = own_sums[d] + double(x[d]);
          own_squares[d] = own_squares[d] + double(x[d]) * double(x[d]);
          ++counts[d];
        }
      }
      for (int64_t d = 0; d < dim; ++d) {
        sums[d] = sums[d] + own_sums[d];
        squares[d] = squares[d] + own_squares[d];
      }
    }
    int exponents[kMaxHeadDim];
    for (int64_t d = 0; d < dim; ++d) {
      const double number = double(std::max<int64_t>(counts[d], 1)), mean = sums[d] / number;
      common.centre[d] = float(mean);
      const double variance = std::max(squares[d] / number - mean * mean, 0.0);
      uint64_t bits;
      std::memcpy(&bits, &variance, sizeof bits);
      exponents[d] = exponent_of_root(bits);
    }
    int sorted[kMaxHeadDim];
    std::copy_n(exponents, dim, sorted);
    std::sort(sorted, sorted + dim);
    for (int64_t d = 0; d < dim; ++d) {
      common.unit[d] =
          std::ldexp(1.0f, exponent_of_unit(exponents[d], sorted[dim / 2], sorted[dim - 1]));
    }
  }

  /** Half i without it, in 8 bits. */
  void narrow(const Kernels& kernels, int64_t i, const CommonPart& common, char* out) const {
    float x[kMaxHeadDim];
    read(i, x);
    for (int64_t d = 0; d < dim; ++d) {
      x[d] = without_common(x[d], common.centre[d], common.unit[d]);
    }
    kernels.to_int8(x, RowType::kFloat32, dim, out);
  }
};

}  // namespace pariskv::cpu
