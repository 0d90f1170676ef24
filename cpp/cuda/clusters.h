/** A device's limits for a kernel, asked once; and how many clusters of it run at a time. */
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "launch.h"

namespace pariskv::cuda {

/** Clusters of one kernel that a device runs at a time; none of several blocks before Hopper. */
struct Clusters {
  static constexpr int kSizes = 5;  // of 1, 2, 4, 8 and 16 blocks
  int at_once[kSizes] = {};         // of 1 << i blocks

  /** @param kernel  made for clusters: see starts_early() */
  static Clusters of(const void* kernel, int shared_bytes) {
    Clusters clusters;
    // Sixteen blocks are more than every device must be able to do.
    succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    for (int i = 1; i < kSizes; ++i) {
      Launch launch(1 << i, shared_bytes, nullptr);
      launch.clusters_of(1 << i);
      int count = 0;
      if (succeeded(cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config))) {
        clusters.at_once[i] = count;
      }
    }
    return clusters;
  }

  /**
   * Blocks of the largest cluster with which all heads run at once. Where rows come over the bus,
   * also of one of eight blocks, if that takes half of the device: its rows are known sooner, and
   * come while other heads wait for their turn.
   */
  int size_for(int64_t heads, int multiprocessors, bool over_bus) const {
    constexpr int kMostInTurns = 8;  // blocks of a cluster that may have to wait for room
    for (int i = kSizes - 1; i > 0; --i) {
      const int size = 1 << i, count = at_once[i];
      const bool in_turns = over_bus && size <= kMostInTurns && 2 * count * size >= multiprocessors;
      if (heads <= count || in_turns) return size;
    }
    return 1;
  }
};

/** `measure(device)`, once for each kernel and device: the limits of the current device. */
template <typename Measure>
auto measured_once(const void* kernel, const Measure& measure) {
  using Fit = decltype(measure(0));
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Fit> known;
  int device = 0;
  check(cudaGetDevice(&device), "ask for the device");
  const std::pair<const void*, int> key{kernel, device};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = measure(device);
}

}  // namespace pariskv::cuda
