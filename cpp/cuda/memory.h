/** Where a GPU's bytes come from when an embedder brings no resource. */
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "pariskv/memory.h"

namespace pariskv::cuda {

std::shared_ptr<MemoryResource> device_resource(int32_t device);

/** Host memory that stays where it is and that the device can read. */
std::shared_ptr<MemoryResource> pinned_resource(int32_t device);

/**
 * Bytes that the system could still give without swapping; negative when it does not say. Pages of
 * such resources are never swapped out: taking more than these starves everybody, or gets a process
 * killed whose control group may not have more.
 * @param root  ahead of the system's own paths: empty, but for tests
 */
int64_t available_host_bytes(const std::string& root);

}  // namespace pariskv::cuda
