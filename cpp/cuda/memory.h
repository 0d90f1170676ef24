/** Where a GPU's bytes come from when an embedder brings no resource. */
#pragma once

#include <cstdint>
#include <memory>
#include <string>

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
 * @param root  where the system says how much it has, see below
 */
std::shared_ptr<MemoryResource> pinned_resource(int32_t device, std::string root = "");

/**
 * Bytes that the system could still give without swapping; negative when it does not say. Pages of
 * such resources are never swapped out: taking more than these starves the machine, or gets a
 * process killed at the limit of its control group.
 * @param root  ahead of the system's own paths: empty, but for tests
 */
int64_t available_host_bytes(const std::string& root);

}  // namespace pariskv::cuda
