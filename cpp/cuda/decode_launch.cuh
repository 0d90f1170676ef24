/** The launches of a decode by one dtype and width: included where they are made. */
#pragma once

#include "decode_estimate.cuh"
#include "decode_resident.cuh"
#include "decode_scan.cuh"
#include "decode_take.cuh"
#include "decode_window.cuh"
#include "dispatch.h"

namespace pariskv::cuda {

/** The kernels of one instance, and what their shared memory holds. */
struct DecodeKernels {
  const void *window, *scan, *votes, *estimate, *take;  // no votes: null
  const void* resident[2];                              // for few parts per block, and for many
  int scan_bytes, table_bytes;                          // of the scan: with no table, and of one
  int resident_threads, resident_bytes, estimate_bytes;
  bool resident_row;           // whether resident_bytes go without the room of a row
  int take_space, take_least;  // of the last: fixed, and the least room after it
  bool take_beside;            // whether it fits beside one block that estimates
};

template <typename Element, int kWords>
const void* vote_kernel_of() {
  if constexpr (32 * kWords <= kMaxVoteDim) {
    return reinterpret_cast<const void*>(vote_kernel<Element, kWords>);
  } else {
    return nullptr;
  }
}

template <typename Element, int kWords>
DecodeKernels kernels_of() {
  constexpr auto padded = [](size_t bytes) { return int((bytes + 127) / 128 * 128); };
  return {reinterpret_cast<const void*>(window_kernel<Element, kWords>),
          reinterpret_cast<const void*>(scan_kernel<Element, kWords>),
          vote_kernel_of<Element, kWords>(),
          reinterpret_cast<const void*>(estimate_kernel<Element, kWords>),
          reinterpret_cast<const void*>(take_kernel<Element, kWords>),
          {reinterpret_cast<const void*>(resident_kernel<Element, kWords, false>),
           reinterpret_cast<const void*>(
               resident_kernel<Element, kWords, kTakesMany<Element, kWords>>)},
          Scan<Element, kWords>::kBytes,
          kTableBytes<kWords>,
          kResidentThreads<Element>,
          kResidentBytes<Element, kWords>,
          padded(sizeof(EstimateSpace<kWords>)) + kEstimateBytes<kWords>,
          kDirect<Element>,
          padded(sizeof(TakeSpace<kWords>)),
          device::kMergeBytes<kWords> + 2 * device::kTileBytes,
          kWords < 8};
}

/** Of a dtype, by rotated dimensions. */
template <typename Element>
DecodeKernels decode_kernels(int64_t rotated_dim) {
  return dispatch(RotatedDims{}, rotated_dim,
                  [](auto dim) { return kernels_of<Element, int(decltype(dim)::kValue / 32)>(); });
}

}  // namespace pariskv::cuda
