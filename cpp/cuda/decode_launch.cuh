/** The launches of a decode by one dtype and width: included where they are made. */
#pragma once

#include "decode_estimate.cuh"
#include "decode_resident.cuh"
#include "decode_scan.cuh"
#include "decode_take.cuh"
#include "decode_window.cuh"

namespace pariskv::cuda {

/** The kernels of one instance, and what their shared memory holds. */
struct DecodeKernels {
  const void *window, *scan, *votes, *estimate, *take;
  const void* resident[2];      // for few parts per block, and for many
  int scan_bytes, table_bytes;  // of the scan: with no table, and of one
  int resident_threads, resident_bytes, estimate_bytes;
  int take_space, take_least;  // of the last: fixed, and the least room after it
  bool take_beside;            // whether it fits beside one block that estimates
};

template <typename Element, int kWords>
DecodeKernels kernels_of() {
  constexpr auto padded = [](size_t bytes) { return int((bytes + 127) / 128 * 128); };
  return {reinterpret_cast<const void*>(window_kernel<Element, kWords>),
          reinterpret_cast<const void*>(scan_kernel<Element, kWords>),
          reinterpret_cast<const void*>(vote_kernel<Element, kWords>),
          reinterpret_cast<const void*>(estimate_kernel<Element, kWords>),
          reinterpret_cast<const void*>(take_kernel<Element, kWords>),
          {reinterpret_cast<const void*>(resident_kernel<Element, kWords, false>),
           reinterpret_cast<const void*>(
               resident_kernel<Element, kWords, kTakesMany<Element, kWords>>)},
          Scan<Element, kWords>::kBytes,
          kTableBytes<kWords>,
          kResidentThreads<Element>,
          padded(kResidentBytes<Element, kWords>),
          padded(sizeof(EstimateSpace<kWords>)) + kEstimateBytes<kWords>,
          padded(sizeof(TakeSpace<kWords>)),
          device::kMergeBytes<kWords> + 2 * device::kTileBytes,
          kWords < 8};
}

/** Of a dtype, by rotated dimensions: 64, 128 or 256. */
template <typename Element>
DecodeKernels decode_kernels(int64_t rotated_dim) {
  return rotated_dim == 64    ? kernels_of<Element, 2>()
         : rotated_dim == 128 ? kernels_of<Element, 4>()
                              : kernels_of<Element, 8>();
}

}  // namespace pariskv::cuda
