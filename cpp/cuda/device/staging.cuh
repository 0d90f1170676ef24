/** Copies into shared memory that pass no register, 16 bytes at a time, zeros for what is not
 * there. */
#pragma once

#include "device/copy.cuh"

namespace pariskv::cuda::device {

/** Starts a copy to a shared address; where `present` is false, nothing is read, zeros are written.
 */
__device__ __forceinline__ void stage16(uint32_t target, const void* source, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

/** Starts a copy of 4 or 8 bytes. */
template <typename T>
__device__ __forceinline__ void stage(T* to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(int(sizeof(T)))
               : "memory");
}

/** Closes a group of copies. */
__device__ __forceinline__ void close_stage() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/** Waits for this thread's copies, all but the last `kGroups` groups. */
template <int kGroups>
__device__ __forceinline__ void await_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace pariskv::cuda::device
