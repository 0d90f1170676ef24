/** Digests of pages of keys on the CPU. */
#pragma once

#include "cpu/simd/kernels.h"
#include "ops.h"

namespace pariskv::cpu {

/** The keys of a page that have a bit in `live`, of the positions from `begin` on. */
struct PageKeys {
  const SequenceView& sequence;
  int64_t head;
  int64_t begin;
  uint64_t live;
};

struct PageNumbers {
  uint64_t* live;
  float* unit;
  uint16_t* digest;  // (2, key_dim)
};

/** Writes a page's digest, of its finite keys, and which these are. */
void digest_page(const Kernels& kernels, const ModelShape& shape, bool box, const PageKeys& keys,
                 const PageNumbers& out);

}  // namespace pariskv::cpu
