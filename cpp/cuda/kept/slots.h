/** A sequence of a batch whose policy attends to kept rows. */
#pragma once

#include "tables.h"

namespace pariskv::cuda {

struct KeptSlot : BatchSlot {
  char* scratch;          // of the first head
  int64_t head_bytes;     // from a head's scratch to the next one's
  int64_t page_capacity;  // of a zone, that the scratch has room for; 0: pages are not looked for
};

}  // namespace pariskv::cuda
