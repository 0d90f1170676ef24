/**
 * What the launches of a decode step cannot do without, with nothing computed: one sequence of a
 * layer with 8 kv heads of 128 dimensions. Such kernels in such a chain tell one another by words
 * that they are done; keys, scores, counts, codes and rows come from memory and over the bus, and
 * clusters have their exchanges; nothing is rotated, scored, compared or attended to. It does less
 * than a step where that is simpler: no resident rows and none of the window, no sampled keys, no
 * scales of weights, and nobody waits for the last of the trips that lead to a block's work. It
 * does more in one place: it looks for the warps that scored, which a step with a short zone does
 * not need. Prints a JSON object a line: microseconds with more and more of it.
 */
#include <cstdio>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_programs.h"
#include "device/copy.cuh"
#include "device/mailbox.cuh"
#include "device/signal.cuh"
#include "pariskv/config.h"
#include "pariskv/decode/attend/parts.cuh"
#include "pariskv/decode/score/keys.cuh"
#include "pariskv/decode/sums.cuh"
#include "pariskv/decode/window/kernel.cuh"
#include "pinned.h"
#include "policy/pariskv/codec/schedule.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

constexpr int kHeads = 8;
// Blocks of a head, and what they leave, are the engine's.
constexpr int kWindows = kWindowBlocks;
constexpr int kScoreBlocks = device::kMostScoreBlocks;
constexpr int kRerankBlocks = device::kSlices;
constexpr int kCluster = device::kMaxCluster;
constexpr int kUnitKeys = device::kUnitKeys<4>, kUnitBytes = device::kUnitBytes<4>;
constexpr int kStages = device::kStages<4>;
constexpr int kCountInts = int(sizeof(device::ScoreCounts) / sizeof(int32_t));
constexpr int kPartFloats = device::kSentFloats, kTasks = 16;  // of a head's attention
constexpr int kRows = 100, kRowBytes = 512;
constexpr int kRecordBytes = 64;
constexpr int64_t kHostBytes = int64_t{512} << 20;
constexpr int kAttendBytes = 92 << 10;

/** What is done besides launching and telling. */
struct Does {
  bool keys, candidates, rows;
};

/** An address of an address: a trip to memory each. */
struct Hop {
  const Hop* next;
  char line[120];
};

struct Chain {
  Does does;
  int units, candidates;  // of a head
  const Hop* hops;        // where every block begins to look for what it works on
  const char* keys;       // (heads, units, kUnitBytes)
  uint8_t* scores;        // (heads, keys)
  int* counts;            // (heads, kScoreBlocks, kCountInts)
  const char* records;    // of all keys of all heads
  int64_t record_count;
  float* estimates;                       // (heads, candidates, 4)
  const char* const* rows;                // (heads, kRows) in host memory
  float* out;                             // (heads, kTasks, 32)
  uint32_t *windows, *scored, *reranked;  // words, by head and block
};

constexpr uint32_t kToken = 1;

/** The way to what a block works on: lane, view, a table, and what that leads to. The last trip is
 * only begun. */
__device__ __forceinline__ void find(const Chain& chain, int trips) {
  const Hop* at = chain.hops;
  if (threadIdx.x == 0) {
    for (int i = 0; i < trips; ++i) at = *const_cast<const Hop* const volatile*>(&at->next);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(256) look(const __grid_constant__ Chain chain) {
  device::let_successor_start();
  find(chain, 4);
  device::store_release_after_block(chain.windows + blockIdx.x, kToken);
}

__global__ void __launch_bounds__(256, 3) score(const __grid_constant__ Chain chain) {
  using Copies = device::WarpCopies<device::kBulkCopies>;
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t barriers[device::kWarps][kStages];
  device::let_successor_start();
  const int head = int(blockIdx.x) / kScoreBlocks, rank = int(blockIdx.x) % kScoreBlocks;
  const int warp = __shfl_sync(~0u, device::warp_id(), 0), lane = device::lane_id();
  find(chain, 3);
  if (lane < kStages) device::ptx::mbarrier_init(&barriers[warp][lane], Copies::kArrivals);
  device::ptx::fence_proxy_async_shared();
  __syncwarp();
  const int team = device::kWarps * kScoreBlocks, mine = rank * device::kWarps + warp;
  const int begin = int(int64_t(chain.units) * mine / team);
  const int end = chain.does.keys ? int(int64_t(chain.units) * (mine + 1) / team) : begin;
  char* own = stages + warp * kStages * kUnitBytes;
  const auto copy = [&](int unit) {
    if (unit >= end || !Copies::takes_part()) return;
    uint64_t* barrier = &barriers[warp][(unit - begin) % kStages];
    Copies::expect_all(barrier, kUnitBytes);
    Copies::stream(own + (unit - begin) % kStages * kUnitBytes,
                   chain.keys + (int64_t(head) * chain.units + unit) * kUnitBytes, kUnitBytes,
                   barrier);
  };
  for (int i = 0; i < kStages; ++i) copy(begin + i);
  device::wait_for_flags(chain.windows + head * kWindows, kWindows, kToken);
  for (int unit = begin; unit < end; ++unit) {
    const int turn = unit - begin;
    device::wait(&barriers[warp][turn % kStages], uint32_t(turn / kStages % 2));
    const char* stage = own + turn % kStages * kUnitBytes;
    const uint32_t some = *reinterpret_cast<const uint32_t*>(stage + 4 * lane);
    __syncwarp();
    copy(unit + kStages);
    auto* to = chain.scores + (int64_t(head) * chain.units + unit) * kUnitKeys;
    reinterpret_cast<uint32_t*>(to)[lane] = some;
  }
  __syncthreads();
  int* counts = chain.counts + int64_t(blockIdx.x) * kCountInts;
  for (int i = int(threadIdx.x); chain.does.keys && i < kCountInts; i += 256) counts[i] = i;
  device::store_release_after_block(chain.scored + blockIdx.x, kToken);
  device::wait_for_predecessor();
}

__global__ void __maxnreg__(96) rerank(const __grid_constant__ Chain chain) {
  device::let_successor_start();
  const int head = int(blockIdx.x) / kRerankBlocks, rank = int(blockIdx.x) % kRerankBlocks;
  find(chain, 3);
  device::wait_for_flags(chain.scored + head * kScoreBlocks, kScoreBlocks, kToken);
  uint32_t sum = 0;
  if (chain.does.candidates) {
    // The threshold in two looks, then the warps that scored, then their scores.
    const int* counts = chain.counts + int64_t(head) * kScoreBlocks * kCountInts;
    const int scans = int(threadIdx.x) / 8, two = 2 * (int(threadIdx.x) % 8);
    for (int look = 0, at = 256; look < 2; ++look) {
      at = __ldcg(counts + scans * kCountInts + at % kCountInts / 16 * 16 + two);
      at = __syncthreads_or(at & 240);
    }
    sum = uint32_t(__ldcg(counts + rank * kCountInts + 272 + int(threadIdx.x) % 8 * 256));
    sum = uint32_t(__syncthreads_or(int(sum)));
    const int64_t keys = int64_t(chain.units) * kUnitKeys;
    const int64_t first = keys * rank / kRerankBlocks / 16 * 16;
    const int64_t last = keys * (rank + 1) / kRerankBlocks;
    for (int64_t i = first + 16 * int64_t(threadIdx.x); i + 16 <= last; i += 16 * 256) {
      const uint4 four = __ldcg(reinterpret_cast<const uint4*>(chain.scores + head * keys + i));
      sum += four.x ^ four.y ^ four.z ^ four.w;
    }
    __syncthreads();
    // Five lanes for a candidate's codes: four pieces of a record, and what lies beside signs.
    const int begin = int(int64_t(chain.candidates) * rank / kRerankBlocks);
    const int end = int(int64_t(chain.candidates) * (rank + 1) / kRerankBlocks);
    for (int i = 5 * begin + int(threadIdx.x); i < 5 * end; i += 256) {
      const uint64_t key = (uint64_t(head) << 32 | uint32_t(i / 5)) * 0x9e3779b97f4a7c15u;
      const char* record = chain.records + int64_t(key >> 20) % chain.record_count * kRecordBytes;
      const auto* piece = i % 5 < 4
                              ? reinterpret_cast<const uint4*>(record) + i % 5
                              : reinterpret_cast<const uint4*>(chain.keys) +
                                    int64_t(key >> 24) % (int64_t(kHeads) * chain.units * 128);
      const uint4 four = __ldg(piece);
      sum += four.x ^ four.y;
      if (i % 5 < 4) {
        chain.estimates[(int64_t(head) * chain.candidates + i / 5) * 4 + i % 5] = float(four.z);
      }
    }
  }
  if (sum == 0x12345678) chain.out[0] = 1;
  device::wait_for_predecessor();
  device::store_release_after_block(chain.reranked + head * kRerankBlocks + rank, kToken);
}

struct AttendSpace {
  device::ClusterMailbox mail;
  alignas(16) int4 bins[2][kCluster][16];
  float parts[kCluster][kPartFloats];
  uint64_t there;
};

__global__ void __launch_bounds__(256, 1) attend(const __grid_constant__ Chain chain) {
  extern __shared__ __align__(128) char shared[];
  auto& space = *reinterpret_cast<AttendSpace*>(shared);
  char* room = shared + (sizeof(AttendSpace) + 127) / 128 * 128;
  const int head = int(blockIdx.x) / kCluster, rank = int(blockIdx.x) % kCluster;
  const int thread = int(threadIdx.x);
  const device::Cluster cluster{kCluster, rank};
  find(chain, 3);
  if (thread == 0) device::ptx::mbarrier_init(&space.there, 1);
  device::ptx::fence_proxy_async_shared();
  __syncthreads();
  space.mail.open(cluster);
  __syncthreads();
  device::wait_for_flags(chain.reranked + head * kRerankBlocks, kRerankBlocks, kToken);
  int sum = 0;
  if (chain.does.candidates) {
    const int first = int(int64_t(chain.candidates) * rank / kCluster);
    const int last = int(int64_t(chain.candidates) * (rank + 1) / kCluster);
    for (int i = first + thread; i < last; i += 256) {
      const float* four = chain.estimates + (int64_t(head) * chain.candidates + i) * 4;
      sum += int(__ldcg(four) + __ldcg(four + 3));
    }
  }
  const char* address = nullptr;
  const int first_row = kRows * rank / kCluster, rows = kRows * (rank + 1) / kCluster - first_row;
  if (chain.does.rows && thread < rows) address = chain.rows[head * kRows + first_row + thread];
  sum = __syncthreads_or(sum);
  // Counts of the top k go to all, then the keys that these do not tell apart.
  for (int exchange = 0; exchange < 2; ++exchange) {
    uint64_t& barrier = space.mail.of(exchange);
    const int lines = exchange == 0 ? 16 : 1;
    if (thread == 0) device::expect_mail(barrier, kCluster * lines * 16);
    if (thread < kCluster * lines) {
      device::send_mail(barrier, thread / lines, &space.bins[exchange][rank][thread % lines],
                        make_int4(sum, 0, 0, 0));
    }
    space.mail.wait(exchange);
    sum += space.bins[exchange][thread % kCluster][0].x;
    __syncthreads();
  }
  if (rank == 0 && thread < kScoreBlocks + kWindows + kRerankBlocks) {
    uint32_t* word = thread < kScoreBlocks ? chain.scored + head * kScoreBlocks + thread
                     : thread < kScoreBlocks + kWindows
                         ? chain.windows + head * kWindows + thread - kScoreBlocks
                         : chain.reranked + head * kRerankBlocks + thread - kScoreBlocks - kWindows;
    *word = 0;
  }
  if (chain.does.rows) {
    using Copies = device::WarpCopies<device::kBulkCopies>;
    if (thread == 0)
      device::ptx::mbarrier_arrive_expect_tx(&space.there, uint32_t(rows * kRowBytes));
    __syncthreads();
    if (thread < rows) Copies::start(room + thread * kRowBytes, address, kRowBytes, &space.there);
    device::wait(&space.there, 0);
    sum += room[thread % (rows * kRowBytes)];
  }
  // A task's parts go to the block that has it.
  if (thread == 0) device::expect_mail(space.mail.parts, kCluster * kPartFloats * 4);
  for (int i = thread; i < kTasks * kPartFloats; i += 256) {
    device::send_mail(space.mail.parts, i / kPartFloats, &space.parts[rank][i % kPartFloats],
                      uint32_t(sum));
  }
  device::wait(&space.mail.parts, 0);
  if (thread < 32) chain.out[(head * kTasks + rank) * 32 + thread] = space.parts[0][thread];
  device::wait_for_predecessor();
}

void launch(const void* kernel, int blocks, int bytes, bool early, int cluster, Chain& chain,
            cudaStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttendBytes),
        "shared memory");
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(256);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "clusters");
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {unsigned(cluster), 1, 1};
  }
  void* arguments[] = {&chain};
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launch");
}

void launch_chain(Chain& chain, cudaStream_t stream) {
  const int stages = device::kWarps * kStages * kUnitBytes;
  launch(reinterpret_cast<const void*>(look), kHeads * kWindows, 0, false, 1, chain, stream);
  launch(reinterpret_cast<const void*>(score), kHeads * kScoreBlocks, stages, true, 1, chain,
         stream);
  launch(reinterpret_cast<const void*>(rerank), kHeads * kRerankBlocks, kAttendBytes, true, 1,
         chain, stream);
  launch(reinterpret_cast<const void*>(attend), kHeads * kCluster, kAttendBytes, true, kCluster,
         chain, stream);
}

/** The median of a graph's replays in cold caches. */
double microseconds(Chain& chain, Clock& clock, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replayed = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launch_chain(chain, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replayed, graph, 0), "graph");
  const double taken = clock.median(
      stream, true, [] {}, [&] { check(cudaGraphLaunch(replayed, stream), "replay"); });
  check(cudaGraphExecDestroy(replayed), "graph");
  check(cudaGraphDestroy(graph), "graph");
  return taken;
}

void run(int rounds) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "device");
  cudaFuncAttributes code{};
  check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(attend)), "code");
  if (major != 9 && major != 10) throw std::runtime_error("clusters of 16 need a Hopper or newer");
  if (code.ptxVersion < 90) throw std::runtime_error("compiled for an older GPU than this one");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "stream");
  Clock clock(rounds);
  std::mt19937_64 random(1);

  void* host = nullptr;
  check(allocate_pinned(&host, size_t(kHostBytes)), "pinned");
  std::vector<const char*> rows(kHeads * kRows);
  for (const char*& row : rows) {
    row = static_cast<const char*>(host) + int64_t(random() % (kHostBytes / kRowBytes)) * kRowBytes;
  }
  constexpr int kHops = 5;
  Hop* hops = device_memory<Hop>(kHops);
  for (int i = 0; i + 1 < kHops; ++i) {
    const Hop* next = hops + i + 1;
    check(cudaMemcpy(&hops[i].next, &next, sizeof next, cudaMemcpyHostToDevice), "upload");
  }

  constexpr int64_t kMost = int64_t{1} << 20;
  Chain chain{};
  chain.hops = hops;
  chain.keys = device_memory<char>(kHeads * kMost / kUnitKeys * kUnitBytes);
  chain.scores = device_memory<uint8_t>(kHeads * kMost);
  chain.counts = device_memory<int>(int64_t(kHeads) * kScoreBlocks * kCountInts);
  chain.records = device_memory<char>(kHeads * kMost * kRecordBytes);
  chain.estimates = device_memory<float>(int64_t(kHeads) * 16384 * 4);
  chain.rows = on_device(rows);
  chain.out = device_memory<float>(kHeads * kTasks * 32);
  chain.windows = device_memory<uint32_t>(kHeads * kWindows);
  chain.scored = device_memory<uint32_t>(kHeads * kScoreBlocks);
  chain.reranked = device_memory<uint32_t>(kHeads * kRerankBlocks);

  const std::pair<const char*, Does> parts[] = {{"launches, words, exchanges", {}},
                                                {"and rows", {false, false, true}},
                                                {"and keys", {true, false, true}},
                                                {"and candidates", {true, true, true}}};
  for (const int64_t tokens : {32 << 10, 128 << 10, 512 << 10, 1 << 20}) {
    chain.units = int(tokens / kUnitKeys);
    chain.candidates = int(candidate_count(ParisKV().resolved(), tokens));
    chain.record_count = kHeads * tokens;
    for (const auto& [what, does] : parts) {
      chain.does = does;
      std::printf("{\"tokens\": %lld, \"what\": \"%s\", \"microseconds\": %.1f}\n",
                  static_cast<long long>(tokens), what, microseconds(chain, clock, stream));
      std::fflush(stdout);
    }
  }
}

}  // namespace

}  // namespace pariskv::cuda

int main(int count, char** arguments) {
  return pariskv::cuda::run_program(count, arguments, pariskv::cuda::run);
}
