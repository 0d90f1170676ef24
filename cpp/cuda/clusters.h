/** How many clusters of a kernel run at a time, and which size of them is launched. */
#pragma once

#include <cstdint>

#include "kernel_limits.h"

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
   * also of one of Tuning::blocks_in_turns, if that takes half of the device: its rows are known
   * sooner, and come while other heads wait for their turn.
   */
  int size_for(int64_t heads, const Limits& limits, bool over_bus) const {
    const int most_in_turns = over_bus ? limits.tuning->blocks_in_turns : 0;
    for (int i = kSizes - 1; i > 0; --i) {
      const int size = 1 << i, count = at_once[i];
      const bool in_turns = size <= most_in_turns && 2 * count * size >= limits.multiprocessors;
      if (heads <= count || in_turns) return size;
    }
    return 1;
  }
};

}  // namespace pariskv::cuda
