#include "pariskv/codec.h"

namespace pariskv {

int64_t rotated_dim_of(int64_t head_dim) {
  int64_t dim = 1;
  while (dim < head_dim) dim *= 2;
  return dim;
}

std::vector<float> rotation_signs(int64_t rotated_dim, uint64_t seed) {
  std::vector<float> signs;
  for (int64_t i = 0; i < rotated_dim; ++i) {
    uint64_t z = seed + uint64_t(i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    signs.push_back(z >> 63 ? -1.0f : 1.0f);
  }
  return signs;
}

}  // namespace pariskv
