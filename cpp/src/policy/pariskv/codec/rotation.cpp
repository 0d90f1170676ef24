#include "pariskv/codec.h"

#include "split_mix.h"

namespace pariskv {

int64_t rotated_dim_of(int64_t head_dim) {
  int64_t dim = 1;
  while (dim < head_dim) dim *= 2;
  return dim;
}

std::vector<float> rotation_signs(int64_t rotated_dim, uint64_t seed) {
  std::vector<float> signs;
  for (int64_t i = 0; i < rotated_dim; ++i) {
    signs.push_back(split_mix(seed, uint64_t(i + 1)) >> 63 ? -1.0f : 1.0f);
  }
  return signs;
}

}  // namespace pariskv
