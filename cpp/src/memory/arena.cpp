#include "memory/arena.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.h"

namespace pariskv {

/** One piece of the resource, cut into equal blocks. */
struct Slab {
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t block_bytes = 0;
  std::vector<int32_t> free;  // indices of blocks nobody has; capacity never grows after making
  int64_t blocks = 0;

  bool unused() const { return int64_t(free.size()) == blocks; }
};

Block::~Block() {
  if (arena_ != nullptr) arena_->free(*this);
}

Arena::Arena(std::shared_ptr<MemoryResource> resource, int64_t budget, ArenaTraits traits)
    : resource_(std::move(resource)), traits_(std::move(traits)) {
  use_.budget = budget;
}

Arena::~Arena() {
  // Every block is gone by now, and whoever used it: what waited to be recycled need not any more.
  for (const RetiredBlock& block : retired_) restore(block);
  trim();
}

int64_t Arena::rounded(int64_t bytes) const {
  const int64_t alignment = traits_.alignment;
  return (std::max<int64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
}

Block Arena::allocate(int64_t bytes) {
  try {
    return try_allocate(bytes);
  } catch (const OutOfMemory&) {
    if (!traits_.reclaim) throw;
    traits_.reclaim();
    trim();  // slabs of other sizes
    return try_allocate(bytes);
  }
}

Block Arena::try_allocate(int64_t bytes) {
  const int64_t size = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (traits_.deferred) retired_.reserve(retired_.size() + blocks_out_ + 1);
  Block block;
  if (shares_slab(size)) {
    Slab* slab = slab_with_room(size);
    block.slab_ = slab;
    block.data_ = slab->data + slab->free.back() * size;
    slab->free.pop_back();
  } else {
    block.data_ = take(size);
  }
  block.arena_ = this;
  block.bytes_ = bytes;
  ++blocks_out_;
  use_.live += size;
  use_.peak = std::max(use_.peak, use_.live);
  return block;
}

Slab* Arena::slab_with_room(int64_t block_bytes) {
  auto& slabs = slabs_[block_bytes];
  for (auto slab = slabs.rbegin(); slab != slabs.rend(); ++slab) {  // the newest has most room
    if (!(*slab)->free.empty()) return slab->get();
  }
  const int64_t least = std::max(traits_.slab_bytes, block_bytes);
  int64_t bytes = least;
  for (size_t i = 0; i < slabs.size() && 2 * bytes <= traits_.largest_slab; ++i) bytes *= 2;
  slabs.reserve(slabs.size() + 1);
  auto slab = std::make_unique<Slab>();
  slab->block_bytes = block_bytes;
  slab->free.reserve(size_t(bytes / block_bytes));
  for (;; bytes = std::max(least, bytes / 2)) {  // a smaller one may still be had
    try {
      slab->data = static_cast<char*>(take(bytes));
      break;
    } catch (const OutOfMemory&) {
      if (bytes == least) throw;
    }
  }
  slab->bytes = bytes;
  slab->blocks = bytes / block_bytes;
  for (int64_t i = slab->blocks - 1; i >= 0; --i) slab->free.push_back(int32_t(i));
  slabs.push_back(std::move(slab));
  return slabs.back().get();
}

void* Arena::take(int64_t bytes) {
  const int64_t free = use_.budget - use_.reserved;
  const std::string kind = traits_.name == nullptr ? "" : std::string(" of ") + traits_.name;
  const std::string asked =
      "[memory] asked for " + std::to_string(bytes) + " bytes" + kind + ", but ";
  if (use_.budget > 0 && bytes > free) {
    throw OutOfMemory(asked + "only " + std::to_string(free) + " of the budget of " +
                      std::to_string(use_.budget) +
                      " are free; remove sequences or raise the budget");
  }
  void* data = nullptr;
  try {
    data = resource_->allocate(size_t(bytes), size_t(traits_.alignment));
  } catch (const std::bad_alloc&) {
    data = nullptr;  // the other way to say no; told the same below
  }
  if (data == nullptr) {
    throw OutOfMemory(asked + "the memory resource has none; " + std::to_string(use_.reserved) +
                      " are held by this cache");
  }
  use_.reserved += bytes;
  return data;
}

void Arena::give_back(void* data, int64_t bytes) noexcept {
  resource_->deallocate(data, size_t(bytes), size_t(traits_.alignment));
  use_.reserved -= bytes;
}

void Arena::free(Block& block) noexcept {
  const RetiredBlock retired{block.slab_, block.data_, rounded(block.bytes_)};
  if (!traits_.deferred) std::memset(retired.data, 0, size_t(retired.bytes));
  const std::lock_guard<std::mutex> lock(mutex_);
  use_.live -= retired.bytes;
  --blocks_out_;
  if (traits_.deferred) {
    retired_.push_back(retired);
  } else {
    restore(retired);
  }
}

std::vector<RetiredBlock> Arena::take_retired() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<RetiredBlock> taken;
  if (retired_.empty()) return taken;
  taken.assign(retired_.begin(), retired_.end());  // retired_ keeps its room
  retired_.clear();
  return taken;
}

void Arena::recycle(const RetiredBlock& block) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  restore(block);
}

void Arena::restore(const RetiredBlock& block) noexcept {
  Slab* slab = block.slab;
  if (slab == nullptr) {
    give_back(block.data, block.bytes);
    return;
  }
  slab->free.push_back(int32_t((static_cast<char*>(block.data) - slab->data) / block.bytes));
  if (!slab->unused() || traits_.deferred) return;  // giving back would wait for the device
  give_back(slab->data, slab->bytes);
  auto& slabs = slabs_[block.bytes];
  slabs.erase(std::find_if(slabs.begin(), slabs.end(),
                           [&](const auto& candidate) { return candidate.get() == slab; }));
}

void Arena::trim() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [block_bytes, slabs] : slabs_) {
    const auto unused = std::partition(slabs.begin(), slabs.end(),
                                       [](const auto& slab) { return !slab->unused(); });
    for (auto slab = unused; slab != slabs.end(); ++slab) give_back((*slab)->data, (*slab)->bytes);
    slabs.erase(unused, slabs.end());
  }
}

MemoryUse Arena::use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}

}  // namespace pariskv
