/** What a device can do for a kernel, asked once; and attributes that kernels of a step share. */
#pragma once

#include <initializer_list>
#include <map>
#include <mutex>
#include <utility>

#include "launch.h"
#include "tuning.h"

namespace pariskv::cuda {

/** The limits of a device for the kernels of one instance. */
struct Limits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block can have
  bool early = false;    // kernels can be launched before their predecessor is done
  const Tuning* tuning = nullptr;

  /** @param kernel  its code says whether kernels start early: see starts_early() */
  static Limits of(const void* kernel, int device) {
    Limits limits;
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, device), "ask for a device's limits");
    };
    ask(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    limits.early = starts_early(kernel);
    limits.tuning = &tuning_of(device);
    return limits;
  }
};

/** Lets blocks of a kernel have so much shared memory. */
inline void allow_shared_bytes(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "give the decode kernels their shared memory");
}

/**
 * Consecutive kernels overlap on a multiprocessor, so all need the same shared-memory carveout.
 * Null: a kernel that an instance does not have.
 */
inline void share_carveout(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    if (kernel == nullptr) continue;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "give the decode kernels their shared memory");
  }
}

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
