/** The cells that a token attends to, from the host's mask. */
#pragma once

#include "bits.h"
#include "shapes.h"

namespace pariskv::ggml {

/** @return false: the mask has a bias, or hides everything */
bool read_mask(const Attention& attention, int64_t token, int64_t stream, Bits* visible);

}  // namespace pariskv::ggml
