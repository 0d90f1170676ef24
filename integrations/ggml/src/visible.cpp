#include "visible.h"

#include <algorithm>

namespace pariskv::ggml {

namespace {

constexpr uint16_t kHidden = 0xfc00;  // -inf as a float16

/** 64 cells, or what is left of them. Adds to `others` what is neither 0 nor -inf. */
uint64_t read_word(const uint16_t* mask, int64_t count, uint64_t* others) {
  uint64_t seen = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool zero = (mask[i] & 0x7fff) == 0;
    seen |= uint64_t{zero} << i;
    *others |= uint64_t{!zero && mask[i] != kHidden};
  }
  return seen;
}

}  // namespace

bool read_mask(const Attention& attention, int64_t token, int64_t stream, Bits* visible) {
  const ggml_tensor* mask = attention.mask;
  const auto* row = reinterpret_cast<const uint16_t*>(static_cast<const char*>(mask->data) +
                                                      size_t(token) * mask->nb[1] +
                                                      size_t(stream % mask->ne[3]) * mask->nb[3]);
  const int64_t cells = attention.visible_cells(), first = attention.first_cell(stream);
  uint64_t others = 0, any = 0;
  for (int64_t begin = 0; begin < cells; begin += 64) {
    const uint64_t seen = read_word(row + begin, std::min<int64_t>(64, cells - begin), &others);
    any |= seen;
    if (first % 64 == 0) {
      if (seen != 0) visible->set_word((first + begin) / 64, seen);
      continue;
    }
    for (uint64_t left = seen; left != 0; left &= left - 1) {
      visible->add(first + begin + __builtin_ctzll(left));
    }
  }
  return others == 0 && any != 0;
}

}  // namespace pariskv::ggml
