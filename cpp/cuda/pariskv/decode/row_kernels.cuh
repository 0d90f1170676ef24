/** The kernels of a dtype that attend to rows: included where they are compiled. */
#pragma once

#include "dispatch.h"
#include "pariskv/decode/attend/kernel.cuh"
#include "pariskv/decode/kernels.h"
#include "pariskv/decode/resident/kernel.cuh"

namespace pariskv::cuda {

template <typename Space>
constexpr int padded_bytes = int((sizeof(Space) + 127) / 128 * 128);

/** @tparam kNarrow  whether rows of the zone are narrow */
template <typename Element, int kWords, bool kNarrow>
void set_row_kernels(DecodeKernels& kernels) {
  kernels.attend_resident[0] = attend_resident_kernel<Element, kWords, false, kNarrow>;
  kernels.attend_resident[1] =
      attend_resident_kernel<Element, kWords, kTakesMany<Element, kWords>, kNarrow>;
  kernels.attend = attend_kernel<Element, kWords, kNarrow>;
  kernels.resident_threads = kResidentThreads<Element>;
  kernels.resident_bytes = kResidentBytes<Element, kWords, kNarrow>;
  kernels.resident_row = kDirect<Element>;
  kernels.attend_space = padded_bytes<AttendSpace<kWords>>;
  kernels.attend_least = device::kMergeBytes<kWords> + 2 * device::kTileBytes;
}

template <typename Element>
void set_narrow_kernels(int64_t rotated_dim, DecodeKernels& kernels) {
  dispatch(RotatedDims{}, rotated_dim, [&](auto dim) {
    set_row_kernels<Element, int(decltype(dim)::kValue / 32), true>(kernels);
  });
}

}  // namespace pariskv::cuda
