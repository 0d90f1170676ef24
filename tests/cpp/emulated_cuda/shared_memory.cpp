// Shared memory: who may touch what, the barriers that lie in it, and copies that arrive late.
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "device/ptx.cuh"
#include "machine.h"

namespace emulator {

namespace {

/** An mbarrier as it lies in memory. */
struct Barrier {
  uint64_t bytes
      : 21;  // that are still to come, plus kNone: an arrival may precede its expectation
  uint64_t phase : 1;
  uint64_t pending : 20;
  uint64_t expected : 20;
  uint64_t mark : 2;  // 1: it was made; the pattern of fresh shared memory has 2
};
static_assert(sizeof(Barrier) == 8);
constexpr uint32_t kNone = 1u << 20;

std::map<size_t, std::vector<char*>> free_windows;

Block& owner_of(uint32_t address) {
  const int rank = int(address >> 24) - 1;
  Cluster& cluster = *current->block->cluster;
  if (rank < 0 || rank >= int(cluster.blocks.size())) {
    fail("%08x is not an address in shared memory", address);
  }
  return cluster.blocks[size_t(rank)];
}
bool is_mine(uint32_t address) { return &owner_of(address) == current->block; }

Barrier& barrier_of(uint64_t* place) {
  auto& barrier = *reinterpret_cast<Barrier*>(place);
  if (barrier.mark != 1) fail("a barrier that was never made");
  return barrier;
}
uint64_t* barrier_at(uint32_t address) {
  auto* place = reinterpret_cast<uint64_t*>(from_shared(address, 8, 8));
  barrier_of(place);
  return place;
}

void check_phase(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != kNone) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
}
void arrive(uint64_t* place) {
  Barrier& barrier = barrier_of(place);
  if (barrier.pending == 0) fail("more arrive at a barrier than it was made for");
  --barrier.pending;
  check_phase(barrier);
}

void check_bulk(uint32_t shared, const void* other, uint32_t bytes) {
  if (bytes == 0 || (shared | reinterpret_cast<uintptr_t>(other) | bytes) % 16 != 0) {
    fail("a bulk copy of %u bytes, %08x and %p", bytes, shared, other);
  }
}
void send_off(const Delivery& delivery) {
  if (seed == 0 || chance(3)) {
    deliver(delivery);
  } else {
    current->block->cluster->deliveries.push_back(delivery);
  }
}

/** Staged copies are done when they are waited for, or by chance before. */
void stage(const Staged& staged) {
  current->staged.push_back(staged);
  current->block->cluster->has_staged = true;
  if (seed == 0) {
    while (do_staged(*current)) {
    }
  }
}

void write(const Stored& stored) { std::memcpy(stored.to, stored.from, stored.bytes); }

}  // namespace

char* take_window(size_t bytes) {
  std::vector<char*>& free = free_windows[bytes];
  if (!free.empty()) {
    char* window = free.back();
    free.pop_back();
    return window;
  }
  void* mapped = mmap(nullptr, bytes + 2 * kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) fail("there is no memory for %zu bytes of shared memory", bytes);
  char* window = static_cast<char*>(mapped) + kPage;
  mprotect(window - kPage, kPage, PROT_NONE);
  mprotect(window + bytes, kPage, PROT_NONE);
  return window;
}
void give_window_back(char* window, size_t bytes) {
  mprotect(window, bytes, PROT_READ | PROT_WRITE);
  free_windows[bytes].push_back(window);
}
void close_window(const Block& block) {
  for (const Delivery& delivery : block.cluster->deliveries) {
    if (delivery.to >= block.window && delivery.to < block.window + block.window_bytes) {
      fail("a block ends while copies to it are under way");
    }
  }
  mprotect(block.window, block.window_bytes, PROT_NONE);
}

char* static_shared_bytes(const void* key, size_t bytes, size_t alignment) {
  constexpr size_t kMost = 48 << 10;  // as on every GPU
  Block& block = *current->block;
  for (const auto& [known, place] : block.statics) {
    if (known == key) return place;
  }
  const size_t at = (block.static_bytes + alignment - 1) / alignment * alignment;
  block.static_bytes = at + bytes;
  if (block.static_bytes > kMost) fail("%zu bytes are declared shared", block.static_bytes);
  block.statics.emplace_back(key, block.window + at);
  return block.window + at;
}

uint32_t shared_address(const void* pointer) {
  const Block& block = *current->block;
  const auto* p = static_cast<const char*>(pointer);
  if (p < block.window || p > block.window + block.window_bytes) {
    fail("%p is not in shared memory", pointer);
  }
  return uint32_t(block.rank + 1) << 24 | uint32_t(p - block.window);
}

char* from_shared(uint32_t address, size_t bytes, size_t alignment) {
  const Block& block = owner_of(address);
  const size_t at = address & 0xffffff;
  char* place = block.window + at;
  if (at + bytes > block.window_bytes) fail("%08x + %zu is beyond shared memory", address, bytes);
  if (at % alignment != 0) fail("%08x is not aligned for %zu bytes", address, alignment);
  if (place >= block.window + (block.static_bytes + 127) / 128 * 128 && place < block.dynamic) {
    fail("%08x is between what is declared shared and what was asked for", address);
  }
  if (&block != current->block && (!block.started || block.alive == 0)) {
    fail("shared memory of a block that has %s", block.started ? "ended" : "not begun");
  }
  return place;
}

uint32_t map_address(uint32_t address, int rank) {
  if (!is_mine(address)) fail("maps an address of another block");
  const uint32_t mapped = (address & 0xffffff) | uint32_t(rank + 1) << 24;
  owner_of(mapped);
  return mapped;
}

bool phase_has_ended(const uint64_t* barrier, uint32_t parity) {
  return reinterpret_cast<const Barrier*>(barrier)->phase != parity;
}

void deliver(const Delivery& delivery) {
  const void* from = delivery.from;
  std::memcpy(delivery.to, from != nullptr ? from : delivery.words, delivery.bytes);
  Barrier& barrier = barrier_of(delivery.barrier);
  if (delivery.bytes > barrier.bytes) fail("far more bytes come than a barrier expects");
  barrier.bytes -= delivery.bytes;
  check_phase(barrier);
}

bool do_staged(Fiber& fiber) {
  if (fiber.staged.empty()) return false;
  const Staged staged = fiber.staged.front();
  fiber.staged.erase(fiber.staged.begin());
  if (staged.kind == Staged::kCopy) {
    if (staged.bytes > 0) std::memcpy(staged.to, staged.from, staged.bytes);
    std::memset(staged.to + staged.bytes, 0, staged.zeros);
  } else if (staged.kind == Staged::kGroup) {
    --fiber.groups;
  } else {
    arrive(staged.barrier);
  }
  return true;
}

}  // namespace emulator

namespace pariskv::cuda::device::ptx {

using namespace emulator;

void mbarrier_init(uint64_t* place, uint32_t arrivals) {
  auto& barrier = *reinterpret_cast<Barrier*>(from_shared(shared_address(place), 8, 8));
  barrier.bytes = kNone;
  barrier.phase = 0;
  barrier.pending = barrier.expected = arrivals;
  barrier.mark = 1;
}
void mbarrier_arrive(uint64_t* place) { arrive(barrier_at(shared_address(place))); }
void mbarrier_expect_tx(uint64_t* place, uint32_t bytes) {
  Barrier& barrier = barrier_of(barrier_at(shared_address(place)));
  if (barrier.bytes + bytes >= 2 * kNone) fail("a barrier expects too many bytes");
  barrier.bytes += bytes;
}
bool mbarrier_try_wait_parity(uint64_t* place, uint32_t parity) {
  barrier_at(shared_address(place));
  if (!phase_has_ended(place, parity)) {
    current->where = "an mbarrier";
    current->barrier = place;
    current->parity = parity;
    yield();
    current->barrier = nullptr;
  }
  return phase_has_ended(place, parity);
}

void cp_async_bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t address = shared_address(to);
  check_bulk(address, from, bytes);
  char* place = from_shared(address, bytes, 16);
  uint64_t* counted = barrier_at(shared_address(barrier));
  send_off({place, static_cast<const char*>(from), bytes, counted, {}});
}
void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier) {
  if (barrier >> 24 != to >> 24) fail("st.async to one block with the barrier of another");
  const uint32_t bytes = 4 * count;
  Delivery delivery{from_shared(to, bytes, bytes), nullptr, bytes, barrier_at(barrier), {}};
  std::memcpy(delivery.words, words, bytes);
  send_off(delivery);
}

void cp_async_bulk_store(void* to, const void* from, uint32_t bytes) {
  const uint32_t address = shared_address(from);
  check_bulk(address, to, bytes);
  const char* place = from_shared(address, bytes, 16);
  current->stores.push_back({static_cast<char*>(to), place, bytes, false});
}
void cp_async_bulk_commit_group() {
  for (Stored& stored : current->stores) stored.committed = true;
  if (seed == 0 || chance(3)) cp_async_bulk_wait_all();
}
void cp_async_bulk_wait_all() {
  std::vector<Stored> left;
  for (const Stored& stored : current->stores) {
    if (stored.committed) {
      write(stored);
    } else {
      left.push_back(stored);
    }
  }
  current->stores = left;
}

void cp_async(uint32_t to, const void* from, int size, int bytes) {
  if (!is_mine(to)) fail("cp.async to another block");
  if (bytes > 0 && reinterpret_cast<uintptr_t>(from) % unsigned(size) != 0) {
    fail("cp.async from %p, which is not aligned", from);
  }
  char* place = from_shared(to, size_t(size), size_t(size));
  stage({Staged::kCopy, place, static_cast<const char*>(from), uint32_t(bytes),
         uint32_t(size - bytes), nullptr});
}
void cp_async_commit_group() {
  ++current->groups;
  stage({Staged::kGroup, nullptr, nullptr, 0, 0, nullptr});
}
void cp_async_wait(int groups) {
  while (current->groups > groups) do_staged(*current);
}
void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  stage({Staged::kArrival, nullptr, nullptr, 0, 0, barrier_at(shared_address(barrier))});
}

}  // namespace pariskv::cuda::device::ptx
