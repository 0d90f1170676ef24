// Launches of the decode kernel: how many blocks share a head, how shared memory is cut.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "runtime.h"
#include "decode.cuh"

namespace pariskv::cuda {

extern template void launch_decode_as<float>(const DecodeCall&, cudaStream_t);
extern template void launch_decode_as<__half>(const DecodeCall&, cudaStream_t);
extern template void launch_decode_as<__nv_bfloat16>(const DecodeCall&, cudaStream_t);

namespace {

constexpr int kSizes = 5;  // clusters of 1, 2, 4, 8 and 16 blocks

/** What a device can do with a kernel. */
struct Fit {
  int multiprocessors = 0;
  int shared_bytes = 0;       // that a block can have
  int clusters[kSizes] = {};  // of 1 << i blocks that run at once
};

cudaLaunchConfig_t config_of(int blocks, int bytes, int cluster, cudaLaunchAttribute& attribute,
                             cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(device::kThreads);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return config;
}

Fit measure(const void* kernel, int index) {
  Fit fit;
  int major = 0;
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(&value, attribute, index), "ask for a device's limits");
  };
  ask(fit.multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(fit.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(major, cudaDevAttrComputeCapabilityMajor);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, fit.shared_bytes),
        "give the decode kernel its shared memory");
  if (major < 9) return fit;
  // Sixteen blocks are more than every device must be able to do.
  succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (int i = 1; i < kSizes; ++i) {
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config =
        config_of(1 << i, fit.shared_bytes, 1 << i, attribute, nullptr);
    int clusters = 0;
    if (succeeded(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config))) {
      fit.clusters[i] = clusters;
    }
  }
  return fit;
}

/** Measured once for each kernel and device. */
Fit fit_of(const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Fit> known;
  int index = 0;
  check(cudaGetDevice(&index), "ask for the device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({kernel, index});
  if (found != known.end()) return found->second;
  return known[{kernel, index}] = measure(kernel, index);
}

/** The largest cluster with which all heads run at once. */
int cluster_size(const Fit& fit, int64_t heads) {
  for (int i = kSizes - 1; i > 0; --i) {
    if (heads <= fit.clusters[i] && heads << i <= fit.multiprocessors) return 1 << i;
  }
  return 1;
}

template <int kWords>
SharedPlan plan_of(const DecodeCall& call, int limit) {
  constexpr int kStage = device::kWarps * device::kUnitBytes<kWords>;
  constexpr int kTable = 4 * kWords * 256;  // votes of one searcher
  constexpr int kAmpleRows = 40 << 10;      // hides the latency of device memory
  constexpr int kRoomy = 200 << 10;         // shared memory of a data centre's card
  constexpr int kNear = 16 << 10;           // scores of a block at 262,144 tokens
  static_assert(device::kMergeBytes<kWords> + 128 <= kStage);
  const bool votes = call.scorer == Scorer::kVotes;
  SharedPlan plan{};
  plan.near_bytes = limit >= kRoomy ? kNear : 0;
  const int left = limit - int((sizeof(DecodeSpace<kWords>) + 127) / 128 * 128) - plan.near_bytes;
  plan.stages = std::clamp((left - kAmpleRows) / kStage, 1, device::kMaxStages);
  plan.rows_bytes = (left - plan.stages * kStage) / 128 * 128;
  plan.packed = votes && call.searchers > 1 && 4 * kTable <= plan.rows_bytes;
  plan.bytes = limit - left + plan.stages * kStage + plan.rows_bytes;
  return plan;
}

}  // namespace

void launch_kernel(const DecodeCall& call, const void* const (&kernels)[3], cudaStream_t stream) {
  const int64_t words = call.shape.rotated_dim / 32;
  const void* kernel = kernels[words == 2 ? 0 : words == 4 ? 1 : 2];
  const Fit fit = fit_of(kernel);
  DecodeLaunch launch{};
  launch.call = call;
  launch.plan = words == 2   ? plan_of<2>(call, fit.shared_bytes)
                : words == 4 ? plan_of<4>(call, fit.shared_bytes)
                             : plan_of<8>(call, fit.shared_bytes);
  const int64_t heads = call.batch * call.shape.kv_heads;
  launch.cluster = cluster_size(fit, heads);
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      config_of(int(heads * launch.cluster), launch.plan.bytes, launch.cluster, attribute, stream);
  void* arguments[] = {&launch};
  check(cudaLaunchKernelExC(&config, kernel, arguments), "decode");
  check_launch("decode");
}

void launch_decode(const DecodeCall& call, cudaStream_t stream) {
  if (call.batch == 0) return;
  switch (call.shape.dtype) {
    case DType::kFloat32:
      return launch_decode_as<float>(call, stream);
    case DType::kFloat16:
      return launch_decode_as<__half>(call, stream);
    case DType::kBFloat16:
      return launch_decode_as<__nv_bfloat16>(call, stream);
  }
}

ScratchLayout scratch_layout(const ModelShape& shape, int64_t searchers, int64_t top_k, bool votes,
                             int64_t zone_capacity, int64_t candidate_capacity) {
  return layout_scratch(shape, searchers, top_k, votes, zone_capacity, candidate_capacity);
}

}  // namespace pariskv::cuda
