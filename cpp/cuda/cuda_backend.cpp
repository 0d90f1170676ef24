// Everything but the verbs: memory, order, updates of device tables.
#include "cuda_backend.h"

#include <algorithm>

#include "check.h"
#include "hardkv/search.h"
#include "memory.h"
#include "memory/available.h"
#include "memory/touch.h"
#include "pariskv/search.h"
#include "prkv/search.h"
#include "tuning.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kMegabyte = int64_t{1} << 20;

/** @param slab_bytes of the first slab of a size; @param ahead as much is there before its time */
ArenaTraits traits_of(const char* name, int64_t slab_bytes, int64_t ahead,
                      std::function<void()> reclaim) {
  ArenaTraits traits;
  traits.name = name;
  traits.alignment = kDeviceAlignment;
  traits.slab_bytes = pooling() ? slab_bytes : traits.alignment;
  traits.largest_slab = pooling() ? 64 * kMegabyte : traits.alignment;
  traits.ahead = pooling() ? ahead : 0;
  traits.deferred = true;
  traits.reclaim = std::move(reclaim);
  return traits;
}

ArenaTraits pinned_traits(const Resources& resources, std::function<void()> reclaim) {
  // Ahead are 4 MB for each layer at a time; it is mapped in pages of 2 MB.
  ArenaTraits traits = traits_of("pinned host memory", 2 * kMegabyte,
                                 resources.pinned ? 0 : 512 * kMegabyte, std::move(reclaim));
  if (resources.pinned) {
    traits.touch = touch_pages;  // our own has been touched
  } else {
    traits.lacking = [shortage = Shortage()](int64_t held) mutable { return shortage.bytes(held); };
  }
  return traits;
}

/**
 * An embedder's resource is called from inside the cache's calls alone. Of our own, what the next
 * flushes need is there before: even cudaMalloc waits while another thread maps pinned memory.
 * Blocks of many sizes share a budget: who has set one is told the same of it every time.
 */
ArenaTraits device_traits(const Config& config, const Resources& resources,
                          const DeviceMemory& memory, std::function<void()> reclaim,
                          std::function<void(void*, int64_t)> clear) {
  const bool ours = !resources.device && config.memory_budget == 0;
  ArenaTraits traits =
      traits_of("device memory", kMegabyte, ours ? 64 * kMegabyte : 0, std::move(reclaim));
  traits.clear = std::move(clear);
  traits.returned = memory.chunk();
  if (memory.chunk() > 0) traits.slab_bytes = traits.largest_slab = memory.chunk();
  return traits;
}

}  // namespace

CudaBackend::CudaBackend(const Config& config, const Resources& resources)
    : device_(config.device.index),
      placement_(config.placement),
      rows_leave_(config.placement == Placement::kHost),
      memory_(config, resources),
      arena_(memory_.resource(), memory_.budget(),
             device_traits(
                 config, resources, memory_,
                 [this] {
                   trim_waiting();
                   memory_.make_way();
                 },
                 [this](void* data, int64_t bytes) { clear(data, bytes); })),
      host_arena_(resources.pinned ? resources.pinned : pinned_resource(device_),
                  config.host_budget, pinned_traits(resources, [this] { trim_waiting(); })),
      order_({&arena_, &host_arena_}),
      exact_(arena_) {}

void CudaBackend::clear(void* data, int64_t bytes) {
  const Chunks::Fresh fresh = memory_.fresh(data, bytes);
  if (fresh.bytes == 0) return;
  const DeviceGuard guard(device_);
  order_.clear(fresh.data, int64_t(fresh.bytes));
  memory_.note_zeros(data, bytes);
}

CudaBackend::~CudaBackend() {
  const DeviceGuard guard(device_);
  exact_.clear();
  try {
    order_.wait();
    offload_.wait_all();
    orphans_.clear();
    order_.finish();
  } catch (const std::exception&) {
    return;  // the device is gone, and what it held with it
  }
}

Block CudaBackend::zeroed_block(int64_t bytes) {
  const DeviceGuard guard(device_);
  Block block = arena_.allocate(bytes);
  try {
    check(cudaMemsetAsync(block.data(), 0, size_t(bytes), order_.upkeep()), "zero a table");
    wait_for(order_.upkeep(), "start a cache on the device");
  } catch (...) {
    sync_ignoring_errors(order_.upkeep());  // memory goes back when nothing zeroes it any more
    throw;
  }
  return block;
}

std::unique_ptr<Search> CudaBackend::make_search(const Config& config, const ModelShape& shape) {
  const DeviceGuard guard(device_);
  PKV_ASSERT(shape.rows.is_plain(shape.dtype));  // kernels know no other rows
  if (const auto* settings = std::get_if<ParisKV>(&config.policy)) {
    return std::make_unique<ParisKVSearch>(*this, *settings, config, shape);
  }
  if (const auto* settings = std::get_if<HardKV>(&config.policy)) {
    return std::make_unique<HardKVSearch>(*this, *settings, config, shape);
  }
  if (const auto* settings = std::get_if<PRKV>(&config.policy)) {
    return std::make_unique<PRKVSearch>(*this, *settings, config, shape);
  }
  return Backend::make_search(config, shape);
}

void CudaBackend::trim_waiting() {
  const DeviceGuard guard(device_);
  release_orphans(true);
  order_.recycle(true);
}

bool CudaBackend::keep_ready(int64_t bytes) {
  if (!memory_.holds()) return false;
  const DeviceGuard guard(device_);
  if (memory_.hold(bytes)) return true;
  throw OutOfMemory("[reserve_device] asked for " + std::to_string(bytes) +
                    " bytes ahead, but the device has fewer; reserve less");
}

void CudaBackend::trim() {
  const DeviceGuard guard(device_);
  order_.wait();
  trim_waiting();
  arena_.trim();
  memory_.trim();
  host_arena_.trim();
}

int64_t CudaBackend::scratch_bytes() const { return exact_.scratch_bytes(); }

void CudaBackend::clear_scratch(Stream) { exact_.clear(); }

void CudaBackend::fetch(void* target, const void* source, int64_t bytes) {
  const DeviceGuard guard(device_);
  order_.wait();
  check(cudaMemcpyAsync(target, source, size_t(bytes), cudaMemcpyDefault, order_.upkeep()),
        "read device memory");
  wait_for(order_.upkeep(), "read device memory");
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

void CudaBackend::add_token(SequenceView* const* views, int64_t count, int64_t layers,
                            Stream stream) {
  const DeviceGuard guard(device_);
  launch_add_token(views, count, layers, handle_of(stream));
}

int64_t CudaBackend::start_offload(const std::vector<RowCopy>& copies, Stream stream) {
  const DeviceGuard guard(device_);
  rows_leave_ = true;
  return offload_.start(copies, handle_of(stream));
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
  // Not for other copies: gigabytes of them may be under way.
  for (const Orphan& orphan : orphans_) {
    if (wait) offload_.wait(orphan.ticket);
  }
  orphans_.erase(std::remove_if(orphans_.begin(), orphans_.end(),
                                [&](const Orphan& orphan) { return offload_.done(orphan.ticket); }),
                 orphans_.end());
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

const Tuning& tuning_of(int device) {
  const Capability capability = capability_of(device);
  return tuning_for(capability.major, capability.minor);
}

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
