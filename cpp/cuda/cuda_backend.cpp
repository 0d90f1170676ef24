// Everything but the verbs: memory, lanes, order, updates of device tables.
#include "cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "memory.h"
#include "policy/pariskv/plan.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kMegabyte = int64_t{1} << 20;

/** @param slab_bytes of the first slab of a size; @param ahead as much is there before its time */
ArenaTraits traits_of(const char* name, int64_t slab_bytes, int64_t ahead,
                      std::function<void()> reclaim) {
  ArenaTraits traits;
  traits.name = name;
  traits.alignment = 256;
  traits.slab_bytes = pooling() ? slab_bytes : traits.alignment;
  traits.largest_slab = pooling() ? 64 * kMegabyte : traits.alignment;
  traits.ahead = pooling() ? ahead : 0;
  traits.deferred = true;
  traits.reclaim = std::move(reclaim);
  return traits;
}

/**
 * An embedder's resource is called from inside the cache's calls alone. Of our own, what the next
 * flushes need is there before: even cudaMalloc waits while another thread maps pinned memory.
 * Blocks of many sizes share a budget: who has set one is told the same of it every time.
 */
template <typename Clear>
ArenaTraits device_traits(const Config& config, const Resources& resources,
                          std::function<void()> reclaim, Clear clear) {
  const bool ours = !resources.device && config.memory_budget == 0;
  ArenaTraits traits =
      traits_of("device memory", kMegabyte, ours ? 64 * kMegabyte : 0, std::move(reclaim));
  traits.clear = clear;
  return traits;
}

ArenaTraits pinned_traits(const Resources& resources, std::function<void()> reclaim) {
  // Ahead are 4 MB for each layer at a time; it is mapped in pages of 2 MB.
  return traits_of("pinned host memory", 2 * kMegabyte, resources.pinned ? 0 : 512 * kMegabyte,
                   std::move(reclaim));
}

}  // namespace

CudaBackend::CudaBackend(const Config& config, const Resources& resources)
    : device_(config.device.index),
      offloads_(config.placement == Placement::kHost),
      arena_(resources.device ? resources.device : device_resource(device_), config.memory_budget,
             device_traits(
                 config, resources, [this] { trim_waiting(); },
                 [this](void* data, int64_t bytes) {
                   const DeviceGuard guard(device_);
                   order_.clear(data, bytes);
                 })),
      host_arena_(resources.pinned ? resources.pinned : pinned_resource(device_),
                  config.host_budget, pinned_traits(resources, [this] { trim_waiting(); })),
      order_({&arena_, &host_arena_}),
      exact_(arena_) {
  try {
    lanes_ = arena_.allocate((kMostBatch + 1) * int64_t(sizeof(Lane)));
    counters_ = arena_.allocate(int64_t(sizeof(DecodeCounts)));
    check(cudaMemsetAsync(counters_.data(), 0, size_t(counters_.bytes()), order_.upkeep()),
          "zero the counters");
    check(cudaMemsetAsync(lanes_.data(), 0, size_t(lanes_.bytes()), order_.upkeep()),
          "zero the lanes");
    wait_for(order_.upkeep(), "start a cache on the device");
  } catch (...) {
    sync_ignoring_errors(order_.upkeep());  // memory goes back when nothing zeroes it any more
    throw;
  }
}

CudaBackend::~CudaBackend() {
  const DeviceGuard guard(device_);
  host_lanes_.clear();
  explaining_ = HostLane();
  choices_ = Block();
  exact_.clear();
  lanes_ = Block();
  counters_ = Block();
  try {
    order_.wait();
    offload_.wait_all();
    orphans_.clear();
    order_.finish();
  } catch (const std::exception&) {
    return;  // the device is gone, and what it held with it
  }
}

void CudaBackend::trim_waiting() {
  const DeviceGuard guard(device_);
  release_orphans(true);
  order_.recycle(true);
}

void CudaBackend::trim() {
  const DeviceGuard guard(device_);
  order_.wait();
  trim_waiting();
  arena_.trim();
  host_arena_.trim();
}

int64_t CudaBackend::scratch_bytes() const {
  int64_t bytes = explaining_.scratch.bytes() + exact_.scratch_bytes() + choices_.bytes();
  for (const HostLane& lane : host_lanes_) bytes += lane.scratch.bytes();
  return bytes;
}

void CudaBackend::clear_scratch(Stream stream) {
  // It stays where it is: a captured graph may be replayed before its lanes are told of another.
  for (HostLane& lane : host_lanes_) {
    if (lane.scratch.bytes() > 0) zero(lane.scratch.data(), lane.scratch.bytes(), stream);
  }
  explaining_.scratch = Block();
  choices_ = Block();
  exact_.clear();
}

void CudaBackend::fetch(void* target, const void* source, int64_t bytes) {
  const DeviceGuard guard(device_);
  order_.wait();
  check(cudaMemcpyAsync(target, source, size_t(bytes), cudaMemcpyDefault, order_.upkeep()),
        "read device memory");
  wait_for(order_.upkeep(), "read device memory");
}

DecodeCounts CudaBackend::counts() {
  DecodeCounts counts;
  fetch(&counts, counters_.data(), int64_t(sizeof counts));
  return counts;
}

// Order.

bool CudaBackend::capturing(Stream stream) {
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return succeeded(cudaStreamIsCapturing(handle_of(stream), &status)) &&
         status != cudaStreamCaptureStatusNone;
}

void CudaBackend::enter(Stream stream) {
  if (capturing(stream)) {
    fail(
        "[stream] expected a stream that is not being captured: of all calls only decode can be "
        "recorded into a graph");
  }
  const DeviceGuard guard(device_);
  release_orphans(false);
  order_.enter(handle_of(stream));
  arena_.tend();
  host_arena_.tend();
}

void CudaBackend::leave(Stream stream) noexcept {
  const DeviceGuard guard(device_);
  order_.leave(handle_of(stream));
}

void CudaBackend::update_word(void* target, uint64_t value) {
  updates_.push_back({static_cast<uint64_t*>(target), value});
}

void CudaBackend::send_words(Stream stream) {
  if (updates_.empty()) return;
  // One launch writes its words in no order: the last value of each word is the one to send.
  std::stable_sort(updates_.begin(), updates_.end(),
                   [](const WordUpdate& a, const WordUpdate& b) { return a.target < b.target; });
  std::vector<WordUpdate> last;
  for (const WordUpdate& update : updates_) {
    if (!last.empty() && last.back().target == update.target) last.pop_back();
    last.push_back(update);
  }
  const DeviceGuard guard(device_);
  launch_word_updates(last.data(), int64_t(last.size()), handle_of(stream));
  updates_.clear();  // not before: words of a refused launch go with the next one
}

int64_t CudaBackend::start_offload(void* target, const void* source, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  return offload_.start(target, source, bytes, handle_of(stream));
}

bool CudaBackend::offloaded(int64_t ticket) {
  const DeviceGuard guard(device_);
  return offload_.done(ticket);
}

void CudaBackend::wait_offloaded(int64_t ticket) {
  const DeviceGuard guard(device_);
  offload_.wait(ticket);
}

void CudaBackend::adopt(Block source, Block target, int64_t ticket) noexcept {
  try {
    orphans_.push_back({std::move(source), std::move(target), ticket});
  } catch (const std::exception&) {
    return;  // waits for nothing: the blocks are retired while a copy may still write them
  }
}

void CudaBackend::release_orphans(bool wait) {
  if (wait) offload_.wait_all();
  orphans_.erase(std::remove_if(orphans_.begin(), orphans_.end(),
                                [&](const Orphan& orphan) { return offload_.done(orphan.ticket); }),
                 orphans_.end());
}

// Lanes.

CudaBackend::HostLane& CudaBackend::host_lane(int64_t row) {
  return row == kMostBatch ? explaining_ : host_lanes_[size_t(row)];
}

void CudaBackend::send_lane(int64_t row, const Lane& lane) {
  Lane& sent = host_lane(row).sent;
  uint64_t before[sizeof(Lane) / 8], after[sizeof(Lane) / 8];
  std::memcpy(before, &sent, sizeof sent);
  std::memcpy(after, &lane, sizeof lane);
  auto* target = reinterpret_cast<uint64_t*>(lanes_.as<Lane>() + row);
  for (size_t i = 0; i < sizeof(Lane) / 8; ++i) {
    if (before[i] != after[i]) update_word(target + i, after[i]);
  }
  sent = lane;
}

void CudaBackend::reserve_lane(int64_t row, const DecodeArgs& args, const ParisKVRules& rules,
                               const SequenceView& sequence) {
  HostLane& host = host_lane(row);
  Lane lane = host.sent;
  lane.layers = sequence.device - args.layer;
  const int64_t candidates = ParisKVPlan::of(sequence).candidates;
  const int64_t zone = sequence.sparse != 0 ? sequence.zone_tokens() : 0;
  const bool none = host.scratch.data() == nullptr;
  if (none) lane.zone_capacity = lane.candidate_capacity = 0;
  if (none || zone > lane.zone_capacity || candidates > lane.candidate_capacity) {
    // Half as much again as asked, so that a growing zone comes here rarely: it is a cudaMalloc.
    const auto roomy = [](int64_t count) { return (count + count / 2 + 4095) / 4096 * 4096; };
    if (zone > lane.zone_capacity) lane.zone_capacity = roomy(zone);
    if (candidates > lane.candidate_capacity) lane.candidate_capacity = roomy(candidates);
    const auto lay_out = [&](char* base) {
      return lay_out_scratch(base, args.shape, rules, lane.zone_capacity, lane.candidate_capacity);
    };
    // It comes as zeros: no flag has the token of a step.
    lane.head_bytes = lay_out(nullptr).head_bytes;
    host.scratch = arena_.allocate(args.shape.kv_heads * lane.head_bytes);
    lane.scratch = lay_out(host.scratch.as<char>()).first;
  }
  send_lane(row, lane);
}

void CudaBackend::check_batch(int64_t batch) {
  if (batch <= kMostBatch) return;
  fail("[decode] sequences: expected at most ", kMostBatch, " at a time on a GPU, got ", batch);
}

template <typename Rules>
void CudaBackend::reserve(const DecodeArgs& args, const Rules& rules) {
  if (args.traced) return reserve_lane(kMostBatch, args, rules, args.sequences[0]);
  check_batch(args.batch);
  if (int64_t(host_lanes_.size()) < args.batch) host_lanes_.resize(size_t(args.batch));
  for (int64_t i = 0; i < args.batch; ++i) reserve_lane(i, args, rules, args.sequences[i]);
  // Rows beyond are nobody's: a graph of more rows leaves them alone.
  for (int64_t i = args.batch; i < int64_t(host_lanes_.size()); ++i) {
    Lane lane = host_lane(i).sent;
    lane.layers = nullptr;
    send_lane(i, lane);
  }
}

void CudaBackend::reserve(const DecodeArgs& args) {
  const DeviceGuard guard(device_);
  std::visit([&](const auto& rules) { reserve(args, rules); }, args.rules);
}

bool is_built() { return true; }

namespace {

struct Capability {
  int major = 0, minor = 0;
};

/** Asks the driver alone: no context is made. */
Capability capability_of(int32_t index) {
  Capability capability;
  succeeded(cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, index));
  succeeded(cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, index));
  return capability;
}

bool runs_on(int32_t index) {
  const Capability capability = capability_of(index);
  return has_code_for(capability.major, capability.minor);
}

}  // namespace

bool is_available() {
  int devices = 0;
  if (!succeeded(cudaGetDeviceCount(&devices))) return false;
  for (int32_t index = 0; index < devices; ++index) {
    if (runs_on(index)) return true;
  }
  return false;
}

std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  const int32_t index = config.device.index;
  int devices = 0;
  const bool counted = succeeded(cudaGetDeviceCount(&devices));
  if (!counted || devices == 0) {
    fail("[config] device: expected cpu, got cuda:", index,
         "; there is no CUDA device, or no driver for it");
  }
  if (index < 0 || index >= devices) {
    fail("[config] device: expected cuda:0 to cuda:", devices - 1, ", got cuda:", index);
  }
  if (!runs_on(index)) {
    const Capability capability = capability_of(index);
    fail("[config] device: expected a GPU that this build has code for (compute capability ",
         code_text(), "), got cuda:", index, " with ", capability.major, ".", capability.minor);
  }
  const DeviceGuard guard(index);
  return std::make_unique<CudaBackend>(config, resources);
}

}  // namespace pariskv::cuda
