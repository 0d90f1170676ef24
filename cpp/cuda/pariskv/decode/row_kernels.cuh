/** The kernels of a dtype that attend to rows: included where they are compiled. */
#pragma once

#include "dispatch.h"
#include "pariskv/decode/attend/kernel.cuh"
#include "pariskv/decode/kernels.h"
#include "pariskv/decode/resident/kernel.cuh"

namespace pariskv::cuda {

template <typename Space>
constexpr int padded_bytes = int((sizeof(Space) + 127) / 128 * 128);

template <typename Element, int kWords>
void set_row_kernels(DecodeKernels& kernels) {
  kernels.attend_resident[0] = attend_resident_kernel<Element, kWords, false>;
  kernels.attend_resident[1] = attend_resident_kernel<Element, kWords, kTakesMany<Element, kWords>>;
  kernels.attend_tail = attend_tail_kernel<Element, kWords>;
  kernels.attend = attend_kernel<Element, kWords, false>;
  kernels.resident_threads = kResidentThreads<Element>;
  kernels.resident_bytes = kResidentBytes<Element, kWords>;
  kernels.tail_bytes = kTailBytes<Element, kWords>;
  kernels.resident_row = kDirect<Element>;
  kernels.attend_space = padded_bytes<AttendSpace<false>>;
  constexpr int kLeast = device::kMergeBytes<kWords> + 2 * device::kTileBytes;
  kernels.attend_least = kLeast;
  static_assert(padded_bytes<AttendSpace<true>> + kLeast <= kLeastSharedBytes);  // which is larger
}

template <typename Element>
void set_narrow_kernels(int64_t rotated_dim, DecodeKernels& kernels) {
  dispatch(RotatedDims{}, rotated_dim, [&](auto dim) {
    kernels.attend = attend_kernel<Element, int(decltype(dim)::kValue / 32), true>;
    kernels.attend_space = padded_bytes<AttendSpace<true>>;
  });
}

}  // namespace pariskv::cuda
