/**
 * Host memory that a device can read and that stays where it is, taken without blocking other
 * threads. Three kinds, the first that there is:
 *
 * Managed memory, told to stay with the host and mapped for the device. The device sees it in
 * pages of 2 MB where it sees other host memory in small ones, and has to look up an address
 * for every row: single rows from anywhere in 4 GB come three times as fast. It is pinned in all
 * but name: nothing moves it, and it is not swapped. The driver's own copies to and from it are
 * slow, and wait; kernels copy instead (runtime.cpp).
 *
 * Memory that the driver maps piece by piece; and memory of cudaHostAlloc. While that looks for
 * pages and clears them, half a millisecond for a megabyte, no thread of the process can launch a
 * kernel.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pariskv::cuda {

/** On the current device; at an address that host and device share. */
cudaError_t allocate_pinned(void** data, size_t bytes);

/** Whether it is of the first kind. */
bool is_managed(const void* data);

/** Nothing may be using it any more. */
cudaError_t free_pinned(void* data, size_t bytes);

}  // namespace pariskv::cuda
