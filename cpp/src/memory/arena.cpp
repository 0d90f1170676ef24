#include "memory/arena.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.h"

namespace pariskv {

/** One piece of the resource, cut into equal blocks. */
struct Slab {
  char* data = nullptr;
  int64_t block_bytes = 0;
  std::vector<int32_t> free;  // indices of blocks nobody has; capacity never grows after making
  int64_t blocks = 0;
};

namespace {

constexpr int64_t kSlabBytes = 1 << 20;
// Up to here a block shares a slab: at most an eighth of one is lost to the odd end.
constexpr int64_t kSmallBytes = kSlabBytes / 8;

int64_t rounded(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + Arena::kAlignment - 1) / Arena::kAlignment *
         Arena::kAlignment;
}

}  // namespace

Block::~Block() {
  if (arena_ != nullptr) arena_->free(*this);
}

Arena::Arena(std::shared_ptr<MemoryResource> resource, int64_t budget)
    : resource_(std::move(resource)) {
  use_.budget = budget;
}

Arena::~Arena() = default;  // every block is gone by now, and with the last one its slab

Block Arena::allocate(int64_t bytes) {
  const int64_t size = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  Block block;
  if (size <= kSmallBytes) {
    Slab* slab = slab_with_room(size);
    block.slab_ = slab;
    block.data_ = slab->data + slab->free.back() * size;
    slab->free.pop_back();
  } else {
    block.data_ = take(size);
  }
  block.arena_ = this;
  block.bytes_ = bytes;
  use_.live += size;
  use_.peak = std::max(use_.peak, use_.live);
  return block;
}

Slab* Arena::slab_with_room(int64_t block_bytes) {
  auto& slabs = slabs_[block_bytes];
  for (auto slab = slabs.rbegin(); slab != slabs.rend(); ++slab) {  // the newest has most room
    if (!(*slab)->free.empty()) return slab->get();
  }
  slabs.reserve(slabs.size() + 1);
  auto slab = std::make_unique<Slab>();
  slab->block_bytes = block_bytes;
  slab->blocks = kSlabBytes / block_bytes;
  slab->free.reserve(size_t(slab->blocks));
  slab->data = static_cast<char*>(take(kSlabBytes));
  for (int64_t i = slab->blocks - 1; i >= 0; --i) slab->free.push_back(int32_t(i));
  slabs.push_back(std::move(slab));
  return slabs.back().get();
}

void* Arena::take(int64_t bytes) {
  const int64_t free = use_.budget - use_.reserved;
  if (use_.budget > 0 && bytes > free) {
    throw OutOfMemory("[memory] asked for " + std::to_string(bytes) + " bytes, but only " +
                      std::to_string(free) + " of the budget of " + std::to_string(use_.budget) +
                      " are free; remove sequences or raise memory_budget");
  }
  void* data = nullptr;
  try {
    data = resource_->allocate(size_t(bytes), size_t(kAlignment));
  } catch (const std::bad_alloc&) {
    data = nullptr;  // the other way to say no; told the same below
  }
  if (data == nullptr) {
    throw OutOfMemory("[memory] asked for " + std::to_string(bytes) +
                      " bytes, but the memory resource has none; " + std::to_string(use_.reserved) +
                      " are held by this cache");
  }
  use_.reserved += bytes;
  return data;
}

void Arena::give_back(void* data, int64_t bytes) noexcept {
  resource_->deallocate(data, size_t(bytes), size_t(kAlignment));
  use_.reserved -= bytes;
}

void Arena::free(Block& block) noexcept {
  const int64_t size = rounded(block.bytes_);
  std::memset(block.data_, 0, size_t(size));
  const std::lock_guard<std::mutex> lock(mutex_);
  use_.live -= size;
  Slab* slab = block.slab_;
  if (slab == nullptr) {
    give_back(block.data_, size);
    return;
  }
  slab->free.push_back(int32_t((static_cast<char*>(block.data_) - slab->data) / size));
  if (int64_t(slab->free.size()) < slab->blocks) return;
  give_back(slab->data, kSlabBytes);
  auto& slabs = slabs_[size];
  slabs.erase(std::find_if(slabs.begin(), slabs.end(),
                           [&](const auto& candidate) { return candidate.get() == slab; }));
}

MemoryUse Arena::use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}

}  // namespace pariskv
