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

/** A launch, and the attributes it points to. */
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  Launch(int64_t blocks, int shared_bytes, cudaStream_t stream, int threads = 256) {
    config.gridDim = dim3(unsigned(blocks));
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
