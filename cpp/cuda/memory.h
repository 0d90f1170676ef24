/** Where a GPU's bytes come from when an embedder brings no resource. */
#pragma once

#include <memory>

#include "pariskv/memory.h"

namespace pariskv::cuda {

std::shared_ptr<MemoryResource> device_resource(int32_t device);

/** Host memory that stays where it is and that the device can read. */
std::shared_ptr<MemoryResource> pinned_resource(int32_t device);

}  // namespace pariskv::cuda
