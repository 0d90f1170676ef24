/**
 * Host memory that a device can read and that stays where it is, taken without getting into the
 * way of others. While cudaHostAlloc looks for pages and clears them, half a millisecond for a
 * megabyte, no thread of the process can launch a kernel. What the driver maps piece by piece is
 * the same memory, and takes as long, but holds up nobody.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pariskv::cuda {

/** On the current device; at an address that host and device share. */
cudaError_t allocate_pinned(void** data, size_t bytes);

/** Nothing may be using it any more. */
cudaError_t free_pinned(void* data, size_t bytes);

}  // namespace pariskv::cuda
