/** Where a GPU's bytes come from when an embedder brings no resource. */
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "memory/available.h"
#include "pariskv/memory.h"

namespace pariskv::cuda {

/**
 * Whether caches made from now on cut blocks from slabs and have memory taken ahead. Without, every
 * block is taken on its own, so that a checker of memory sees an access beyond one: for tests,
 * and for builds with PARISKV_POOLING=OFF.
 */
bool& pooling();

std::shared_ptr<MemoryResource> device_resource(int32_t device);

/**
 * Host memory that stays where it is and that the device can read.
 * @param root  where the system says how much it has, see available_host_bytes
 */
std::shared_ptr<MemoryResource> pinned_resource(int32_t device, std::string root = "");

}  // namespace pariskv::cuda
