// A decode step as five kernels: what heads find in their windows, every key scored, resident rows
// attended to, candidates estimated, the best rows attended to. Each may take its place on the
// device while the one before it is still at work.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "decode_launch.cuh"
#include "elements.h"
#include "runtime.h"

namespace pariskv::cuda {

extern template DecodeKernels decode_kernels<float>(int64_t);
extern template DecodeKernels decode_kernels<__half>(int64_t);
extern template DecodeKernels decode_kernels<__nv_bfloat16>(int64_t);

namespace {

constexpr int kClusters = 5;  // of 1, 2, 4, 8 and 16 blocks
constexpr int kScansPerProcessor = 2;
constexpr int kEstimatesPerProcessor = 2;
/**
 * Where all heads have room for kSlices blocks that estimate: half of them, each with a
 * multiprocessor to itself, instead of all, two to a multiprocessor.
 */
constexpr bool kOneEstimateBlockPerSm = false;
/** Blocks that fetch the code of estimates into the caches while the scan runs; 0: none. */
constexpr int kRehearsing = 8;
constexpr int kMostInTurns = 8;       // blocks of a cluster that may have to wait for room
constexpr int kTakeBytes = 92 << 10;  // two blocks on a processor, or one beside the one before

/** What a device can do with the kernels of one instance. */
struct Fit {
  int multiprocessors = 0;
  int shared_bytes = 0;          // that a block can have
  bool early = false;            // kernels can be launched before their predecessor is done
  int clusters[kClusters] = {};  // of 1 << i blocks that run at once
};

/** A launch, and the attributes it points to. */
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  Launch(int64_t blocks, int shared_bytes, cudaStream_t stream, int threads = device::kThreads) {
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
  void run(const void* kernel, DecodeLaunch& launch, const char* what) {
    launch.shared_bytes = int(config.dynamicSmemBytes);
    void* arguments[] = {&launch};
    check(cudaLaunchKernelExC(&config, kernel, arguments), what);
    check_launch(what);
  }
};

Fit measure(const DecodeKernels& kernels, int index) {
  Fit fit;
  int major = 0;
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(&value, attribute, index), "ask for a device's limits");
  };
  ask(fit.multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(fit.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(major, cudaDevAttrComputeCapabilityMajor);
  const auto allow = [](const void* kernel, int bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "give the decode kernels their shared memory");
  };
  for (const void* kernel : {kernels.scan, kernels.estimate, kernels.take}) {
    allow(kernel, fit.shared_bytes);
  }
  constexpr int kMostRowBytes = 2 * int(kMaxHeadDim) * 4;
  for (const void* kernel : kernels.resident) allow(kernel, kernels.resident_bytes + kMostRowBytes);
  // Blocks of one meet blocks of the next: all must want the memory cut alike.
  for (const void* kernel : {kernels.window, kernels.votes, kernels.scan, kernels.resident[0],
                             kernels.resident[1], kernels.estimate, kernels.take}) {
    if (kernel == nullptr) continue;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "give the decode kernels their shared memory");
  }
  // Code for older devices runs on newer ones too, and neither waits nor makes clusters.
  cudaFuncAttributes code{};
  check(cudaFuncGetAttributes(&code, kernels.take), "ask for a kernel's code");
  const bool hopper = major >= 9 && code.ptxVersion >= 90;
  fit.early = hopper;
  if (!hopper) return fit;
  // Sixteen blocks are more than every device must be able to do.
  succeeded(cudaFuncSetAttribute(kernels.take, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (int i = 1; i < kClusters; ++i) {
    Launch launch(1 << i, std::min(kTakeBytes, fit.shared_bytes), nullptr);
    launch.clusters_of(1 << i);
    int clusters = 0;
    if (succeeded(cudaOccupancyMaxActiveClusters(&clusters, kernels.take, &launch.config))) {
      fit.clusters[i] = clusters;
    }
  }
  return fit;
}

/** Measured once for each instance and device. */
Fit fit_of(const DecodeKernels& kernels) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Fit> known;
  int index = 0;
  check(cudaGetDevice(&index), "ask for the device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({kernels.take, index});
  if (found != known.end()) return found->second;
  return known[{kernels.take, index}] = measure(kernels, index);
}

/**
 * The largest cluster with which all heads run at once; or one of eight blocks, where that takes
 * half of the device: its rows are known sooner, and come while other heads wait for their turn.
 */
int cluster_size(const Fit& fit, int64_t heads) {
  for (int i = kClusters - 1; i > 0; --i) {
    const int size = 1 << i, clusters = fit.clusters[i];
    const bool in_turns = size <= kMostInTurns && 2 * clusters * size >= fit.multiprocessors;
    if (heads <= clusters || in_turns) return size;
  }
  return 1;
}

/**
 * Blocks per head: as many as run at once. Of a batch in branches just enough for all of them to
 * leave no more than a sixteenth of the device idle, so that they run side by side.
 */
int blocks_per_head(const Fit& fit, const DecodeCall& call, int most, int per_processor) {
  const int64_t room = int64_t(fit.multiprocessors) * per_processor;
  const int64_t all_heads = call.batch * call.shape.kv_heads;
  const int64_t at_once = room / call.heads, enough = (room - room / 16 - 1) / all_heads + 1;
  const int64_t blocks = call.heads == all_heads ? at_once : std::min(at_once, enough);
  return int(std::clamp<int64_t>(blocks, 1, most));
}

/** The largest power of two up to `most`. */
int power_within(int most) {
  int power = 1;
  while (2 * power <= most) power *= 2;
  return power;
}

DecodeKernels kernels_of(const ModelShape& shape) {
  return dispatch_element(shape.rows.dtype, [&](auto element) {
    return decode_kernels<decltype(element)>(shape.rotated_dim);
  });
}

/** The scan's shared memory: a ring of units, and tables for votes. */
int plan_scan(const DecodeKernels& kernels, const Fit& fit, DecodeLaunch& launch) {
  const bool votes = launch.call.scorer == Scorer::kVotes;
  launch.packed = votes && launch.call.searchers > 1 &&
                  4 * kernels.table_bytes + kernels.scan_bytes <= fit.shared_bytes;
  const int tables = votes ? kernels.table_bytes * (launch.packed ? 4 : 1) : 0;
  return kernels.scan_bytes + tables;
}

/** Whether the query of a searcher is one that lies in whole pieces of 16 bytes. */
bool queries_in_pieces(const DecodeCall& call) {
  const auto bytes = [&](int64_t elements) {
    return uint64_t(elements * size_of(call.shape.rows.dtype));
  };
  const uint64_t all = reinterpret_cast<uintptr_t>(call.q.data) | bytes(call.q.stride_i) |
                       bytes(call.q.stride_j) | bytes(call.shape.rows.key_dim);
  return all % 16 == 0 && call.scorer == Scorer::kSignNorm &&
         call.group_rule != GroupRule::kMeanQuery;
}

void launch_estimates(const DecodeKernels& kernels, const Fit& fit, DecodeLaunch& launch,
                      cudaStream_t stream) {
  const bool alone = launch.ready_flags && kOneEstimateBlockPerSm;
  if (alone) launch.estimate_blocks /= 2;
  const int64_t heads = launch.call.heads, blocks = heads * launch.estimate_blocks;
  // Half of what a block can have: a block takes some besides, so two do not fit.
  const int bytes = std::max(kernels.estimate_bytes, alone ? fit.shared_bytes / 2 : 0);
  const int64_t room = int64_t(fit.multiprocessors) * (alone ? 1 : kEstimatesPerProcessor);
  const int64_t most = fit.early ? std::min<int64_t>(kRehearsing, heads) : 0;
  launch.rehearsing = int(std::clamp<int64_t>(room - blocks, 0, most));
  launch.by_blocks = device::IndexDivisor::of(launch.estimate_blocks);
  Launch(launch.rehearsing + blocks, bytes, stream)
      .early(fit.early)
      .run(kernels.estimate, launch, "decode: estimate");
}

int resident_bytes(const DecodeKernels& kernels, const ModelShape& shape) {
  const int row = kernels.resident_row ? int(shape.rows.bytes()) : 0;
  return (kernels.resident_bytes + row + 127) / 128 * 128;
}

/** What blocks of a step call it among themselves. */
uint32_t next_token() {
  static std::atomic<uint32_t> last{0};
  uint32_t token = 0;
  while (token == 0) token = ++last;
  return token;
}

}  // namespace

void launch_decode(const DecodeCall& call, cudaStream_t stream) {
  if (call.heads == 0) return;
  const DecodeKernels kernels = kernels_of(call.shape);
  const Fit fit = fit_of(kernels);
  const int64_t heads = call.heads;
  const auto runs = [&](DecodeStep step) {
    return call.first_step <= step && step <= call.last_step;
  };
  DecodeLaunch launch{};
  launch.call = call;
  launch.scan_blocks = blocks_per_head(fit, call, device::kMostScans, kScansPerProcessor);
  launch.estimate_blocks = blocks_per_head(fit, call, device::kSlices, kEstimatesPerProcessor);
  launch.ready_flags =
      fit.early && kernels.take_beside && launch.estimate_blocks == device::kSlices;
  launch.resident_blocks = power_within(std::min(launch.estimate_blocks, device::kParts));
  launch.stages_queries = queries_in_pieces(call);
  launch.token = next_token();
  launch.scans = runs(kScan);
  launch.estimates = runs(kEstimate);
  launch.segment = device::SegmentDivisor::of(call.shape.segment_tokens);
  launch.by_heads = device::IndexDivisor::of(call.shape.kv_heads);
  launch.by_blocks = device::IndexDivisor::of(launch.scan_blocks);
  const int scan_bytes = plan_scan(kernels, fit, launch);
  if (runs(kScan)) {
    if (call.scorer == Scorer::kVotes) {
      Launch(heads * launch.scan_blocks, 0, stream).run(kernels.votes, launch, "decode: votes");
    }
    const bool looks = call.scorer == Scorer::kSignNorm && call.searchers > 1;
    if (looks) {
      Launch(heads * kWindowBlocks, 0, stream).run(kernels.window, launch, "decode: window");
    }
    Launch(heads * launch.scan_blocks, scan_bytes, stream)
        .early(fit.early && (looks || call.scorer == Scorer::kVotes))
        .run(kernels.scan, launch, "decode: scan");
  }
  if (runs(kEstimate)) {
    launch.by_blocks = device::IndexDivisor::of(heads);
    Launch(heads * launch.resident_blocks, resident_bytes(kernels, call.shape), stream,
           kernels.resident_threads)
        .early(fit.early && runs(kScan))
        .run(kernels.resident[device::kParts / launch.resident_blocks >= kManyParts], launch,
             "decode: resident rows");
    launch_estimates(kernels, fit, launch, stream);
  }
  if (runs(kTake)) {
    launch.cluster_size = cluster_size(fit, heads);
    // Of more heads, the rows of some keep the bus busy while others are searched.
    launch.start_rows_early =
        call.batch * call.shape.kv_heads * launch.cluster_size <= fit.multiprocessors;
    const int bytes =
        std::max(std::min(kTakeBytes, fit.shared_bytes), kernels.take_space + kernels.take_least);
    Launch(heads * launch.cluster_size, bytes, stream)
        .clusters_of(launch.cluster_size)
        .early(fit.early && runs(kEstimate))
        .run(kernels.take, launch, "decode: take");
  }
}

ScratchLayout scratch_layout(const ModelShape& shape, int64_t searchers, int64_t top_k, bool votes,
                             int64_t zone_capacity, int64_t candidate_capacity) {
  return layout_scratch(shape, searchers, top_k, votes, zone_capacity, candidate_capacity);
}

}  // namespace pariskv::cuda
