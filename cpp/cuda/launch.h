/** Launches of kernels that take one struct of parameters: as clusters, ahead of their turn. */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "runtime.h"

namespace pariskv::cuda {

/** A kernel that is launched with `Params`. */
template <typename Params>
struct Kernel {
  const void* address = nullptr;

  Kernel() = default;
  template <typename Argument>
  Kernel(void (*kernel)(Argument)) : address(reinterpret_cast<const void*>(kernel)) {
    static_assert(std::is_same_v<std::decay_t<Argument>, Params>);
  }
};

/** The current device's compute capability, as far as the point. */
inline int capability_major() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "ask for the device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "ask for a device's limits");
  return major;
}

/**
 * Whether a kernel can be launched on the current device before its predecessor is done: code for
 * older devices runs on newer ones too, and does not wait.
 */
inline bool starts_early(const void* kernel) {
  cudaFuncAttributes code{};
  check(cudaFuncGetAttributes(&code, kernel), "ask for a kernel's code");
  return capability_major() >= 9 && code.ptxVersion >= 90;
}

/** A launch, and the attributes it points to. */
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  Launch(int64_t blocks, int shared_bytes, cudaStream_t stream, int threads = 256)
      : Launch(dim3(unsigned(blocks)), shared_bytes, stream, threads) {}
  Launch(dim3 blocks, int shared_bytes, cudaStream_t stream, int threads) {
    config.gridDim = blocks;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
  }
  Launch& clusters_of(int blocks) {
    if (blocks == 1) return *this;
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(blocks), 1, 1};
    return *this;
  }
  Launch& early(bool may) {
    if (!may) return *this;
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  template <typename Params>
  void run(Kernel<Params> kernel, Params params, const char* what) {
    void* arguments[] = {&params};
    check(cudaLaunchKernelExC(&config, kernel.address, arguments), what);
    check_launch(what);
  }
};

}  // namespace pariskv::cuda
