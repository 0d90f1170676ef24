#include "memory/arena.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.h"
#include "growth.h"
#include "memory/heap.h"
#include "memory/slab.h"

namespace pariskv {

void Arena::Shelf::open(Slab* slab) noexcept {
  slab->before = nullptr;
  slab->after = with_room;
  if (with_room != nullptr) with_room->before = slab;
  with_room = slab;
}

void Arena::Shelf::close(Slab* slab) noexcept {
  (slab->before != nullptr ? slab->before->after : with_room) = slab->after;
  if (slab->after != nullptr) slab->after->before = slab->before;
}

void Arena::Shelf::add(std::unique_ptr<Slab> slab) {
  slab->number = slabs.size();
  free += slab->blocks;
  open(slab.get());
  slabs.push_back(std::move(slab));
}

void Arena::Shelf::drop(Slab* slab) noexcept {
  close(slab);
  free -= slab->blocks;
  const size_t number = slab->number;
  slabs[number].swap(slabs.back());
  slabs[number]->number = number;
  slabs.pop_back();
}

int64_t Block::taken() const { return arena_ == nullptr ? 0 : arena_->rounded(bytes_); }

void Block::hold(Holds what) noexcept {
  if (arena_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(arena_->mutex_);
  arena_->held_[size_t(holds_)] -= bytes_;
  arena_->held_[size_t(what)] += bytes_;
  holds_ = what;
}

Block::~Block() {
  if (arena_ != nullptr) arena_->free(*this);
}

Arena::Arena(std::shared_ptr<MemoryResource> resource, int64_t budget, ArenaTraits traits)
    : resource_(std::move(resource)), traits_(std::move(traits)) {
  use_.budget = budget;
  if (traits_.ahead > 0) ahead_ = std::make_unique<Ahead>(resource_, traits_.alignment);
}

Arena::~Arena() {
  // All blocks and their users are gone by now: retired blocks need not wait any more.
  for (const RetiredBlock& block : retired_) restore(block);
  trim();
}

int64_t Arena::rounded(int64_t bytes) const {
  const int64_t alignment = traits_.alignment;
  return (std::max<int64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
}

Block Arena::allocate(int64_t bytes, Holds what) {
  try {
    return try_allocate(bytes, what);
  } catch (const OutOfMemory&) {
    if (!traits_.reclaim && !holds_) throw;
    if (traits_.reclaim) traits_.reclaim();
    trim();  // slabs of other sizes
    return try_allocate(bytes, what);
  }
}

Block Arena::try_allocate(int64_t bytes, Holds what) {
  const int64_t size = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (traits_.deferred) make_room(retired_, retired_.size() + blocks_out_ + 1);
  Block block;
  if (comes_from_slab(size, what)) {
    Slab* slab = slab_with_room(size);
    block.slab_ = slab;
    block.data_ = slab->data + slab->free.back() * size;
    slab->free.pop_back();
    Shelf& shelf = shelves_[size];
    if (slab->free.empty()) shelf.close(slab);
    --shelf.free, ++shelf.taken;
  } else {
    block.data_ = take(size);
  }
  block.arena_ = this;
  block.bytes_ = bytes;
  block.holds_ = what;
  ++blocks_out_;
  held_[size_t(what)] += bytes;
  use_.live += size;
  use_.peak = std::max(use_.peak, use_.live);
  return block;
}

Slab* Arena::slab_with_room(int64_t block_bytes) {
  Shelf& shelf = shelves_[block_bytes];
  // Memory on its way arrives sooner than memory requested now.
  while (shelf.free == 0 && !coming_.empty() &&
         (ahead_->arrived() || coming_.front()->block_bytes == block_bytes)) {
    take_in();
  }
  if (shelf.free > 0) return shelf.with_room;
  const int64_t least = std::max(traits_.slab_bytes, block_bytes);
  int64_t bytes = next_slab_bytes(shelf, block_bytes, traits_.largest_slab);
  std::unique_ptr<Slab> slab = make_slab(bytes, block_bytes);
  for (;; bytes = std::max(least, bytes / 2)) {  // a smaller one may still be had
    try {
      slab->data = static_cast<char*>(take(bytes));
      break;
    } catch (const OutOfMemory&) {
      if (bytes == least) throw;
    }
  }
  slab->bytes = bytes;
  return put_up(std::move(slab));
}

int64_t Arena::next_slab_bytes(const Shelf& shelf, int64_t block_bytes, int64_t most) const {
  int64_t bytes = least_slab(block_bytes);
  for (size_t i = 0; i < shelf.slabs.size() && 2 * bytes <= most; ++i) bytes *= 2;
  return bytes;
}

/** Without data yet, and with a place kept for it on its shelf: putting it there cannot fail. */
std::unique_ptr<Slab> Arena::make_slab(int64_t bytes, int64_t block_bytes) {
  auto slab = std::make_unique<Slab>();
  slab->bytes = bytes;
  slab->block_bytes = block_bytes;
  slab->free.reserve(size_t(bytes / block_bytes));
  auto& slabs = shelves_[block_bytes].slabs;
  make_room(slabs, slabs.size() + coming_.size() + 2);  // others may be on their way
  return slab;
}

Slab* Arena::put_up(std::unique_ptr<Slab> slab) {
  try {
    if (traits_.clear) traits_.clear(slab->data, slab->bytes);
  } catch (...) {
    give_back(slab->data, slab->bytes);
    throw;
  }
  Shelf& shelf = shelves_[slab->block_bytes];
  slab->blocks = slab->bytes / slab->block_bytes;
  for (int64_t i = slab->blocks - 1; i >= 0; --i) slab->free.push_back(int32_t(i));
  shelf.add(std::move(slab));
  return shelf.slabs.back().get();
}

bool Arena::runs_low(const Shelf& shelf, int64_t block_bytes) const {
  return shelf.free < std::min(shelf.taken, traits_.ahead / block_bytes);
}

void Arena::ask_ahead() {
  for (const auto& [block_bytes, shelf] : shelves_) {
    if (!runs_low(shelf, block_bytes)) continue;
    const int64_t least = std::max(traits_.slab_bytes, block_bytes);
    int64_t bytes = next_slab_bytes(shelf, block_bytes, std::min(kAheadSlab, traits_.largest_slab));
    while (use_.budget > 0 && bytes > use_.budget - use_.reserved) {
      if (bytes == least) return;
      bytes = std::max(least, bytes / 2);
    }
    std::unique_ptr<Slab> slab = make_slab(bytes, block_bytes);
    ask(slab);
    return;
  }
}

/** Puts a slab among those that are to come; false: there is no thread to bring it. */
bool Arena::ask(std::unique_ptr<Slab>& slab) {
  coming_.emplace_back();  // its place, so that nothing can fail once it is asked for
  try {
    if (ahead_->ask(slab->bytes)) {
      use_.reserved += slab->bytes, use_.coming += slab->bytes;
      coming_.back() = std::move(slab);
      return true;
    }
  } catch (...) {
    coming_.pop_back();
    throw;
  }
  coming_.pop_back();
  return false;
}

/** Waits for the slab that comes next, and puts it up. */
void Arena::take_in() noexcept {
  std::unique_ptr<Slab> slab = std::move(coming_.front());
  coming_.pop_front();
  use_.coming -= slab->bytes;
  slab->data = static_cast<char*>(ahead_->collect());
  if (slab->data == nullptr) {
    use_.reserved -= slab->bytes;
    turn_away();  // nor will the resource have more
    ahead_refused_ = true;
    return;
  }
  try {
    put_up(std::move(slab));
  } catch (const std::exception&) {
    ahead_refused_ = true;  // it has been given back; the next allocation says why
  }
}

/** Asks for no more of what is to come than the thread is at. */
void Arena::call_off() noexcept {
  for (int64_t left = ahead_->take_back(); left > 0; --left) {
    use_.reserved -= coming_.back()->bytes, use_.coming -= coming_.back()->bytes;
    coming_.pop_back();
  }
}

/** Waits for that too, and gives it back. */
void Arena::turn_away() noexcept {
  if (coming_.empty()) return;
  call_off();
  for (; !coming_.empty(); coming_.pop_front()) {
    void* data = ahead_->collect();
    use_.coming -= coming_.front()->bytes;
    if (data != nullptr) {
      give_back(data, coming_.front()->bytes);
    } else {
      use_.reserved -= coming_.front()->bytes;
    }
  }
}

void Arena::tend() noexcept {
  if (!ahead_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!coming_.empty() && ahead_->arrived()) take_in();
  const int64_t lacking = traits_.lacking ? traits_.lacking(use_.reserved) : 0;
  if (lacking > 0) return give_way(lacking);
  if (!coming_.empty() || ahead_refused_) return;
  try {
    ask_ahead();
  } catch (const std::bad_alloc&) {
    return;  // not needed yet: a failed allocation will report it
  }
}

/** The system lacks so many bytes: unused slabs go back, by the thread. */
void Arena::give_way(int64_t bytes) noexcept {
  call_off();
  for (auto& [block_bytes, shelf] : shelves_) {
    for (size_t i = shelf.slabs.size(); i-- > 0 && bytes > 0;) {
      Slab* const slab = shelf.slabs[i].get();
      if (!slab->unused()) continue;
      try {
        if (!ahead_->give_back(slab->data, slab->bytes)) return;
      } catch (const std::bad_alloc&) {
        return;
      }
      use_.reserved -= slab->bytes;
      bytes -= slab->bytes;
      shelf.drop(slab);
    }
  }
}

void* Arena::take(int64_t bytes) {
  const int64_t free = use_.budget - use_.reserved;
  const auto refuse = [&](const std::string& why) {
    const std::string kind = traits_.name == nullptr ? "" : std::string(" of ") + traits_.name;
    throw OutOfMemory("[memory] asked for " + std::to_string(bytes) + " bytes" + kind + ", but " +
                      why);
  };
  if (use_.budget > 0 && bytes > free) {
    refuse("only " + std::to_string(free) + " of the budget of " + std::to_string(use_.budget) +
           " are free; remove sequences or raise the budget");
  }
  void* data = nullptr;
  try {
    data = resource_->allocate(size_t(bytes), size_t(traits_.alignment));
  } catch (const std::bad_alloc&) {
    data = nullptr;  // the other way to say no; told the same below
  }
  if (data == nullptr) {
    refuse("the memory resource has none; " + std::to_string(use_.reserved) +
           " are held by this cache");
  }
  use_.reserved += bytes;
  return data;
}

void Arena::give_back(void* data, int64_t bytes) noexcept {
  resource_->deallocate(data, size_t(bytes), size_t(traits_.alignment));
  use_.reserved -= bytes;
  ahead_refused_ = false;
}

void Arena::zero(const RetiredBlock& block) const noexcept {
  const auto mapped = [&](int64_t bytes) {
    return goes_to_the_system(*resource_, size_t(bytes), size_t(traits_.alignment));
  };
  if (block.slab == nullptr) {
    if (!mapped(block.bytes)) std::memset(block.data, 0, size_t(block.bytes));
    return;
  }
  const auto held = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return block.slab->held;
  };
  if (mapped(block.slab->bytes) && !held()) {
    zero_mapped(block.data, size_t(block.bytes));
  } else {  // pages of a slab that was reserved are to stay
    std::memset(block.data, 0, size_t(block.bytes));
  }
}

void Arena::free(Block& block) noexcept {
  const RetiredBlock retired{block.slab_, block.data_, rounded(block.bytes_)};
  if (!traits_.deferred) zero(retired);
  const std::lock_guard<std::mutex> lock(mutex_);
  use_.live -= retired.bytes;
  held_[size_t(block.holds_)] -= block.bytes_;
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

void Arena::recycle(const RetiredBlock* blocks, size_t count) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < count; ++i) restore(blocks[i]);
}

void Arena::restore(const RetiredBlock& block) noexcept {
  Slab* slab = block.slab;
  if (slab == nullptr) {
    give_back(block.data, block.bytes);
    return;
  }
  Shelf& shelf = shelves_[block.bytes];
  if (slab->free.empty()) shelf.open(slab);
  slab->free.push_back(int32_t((static_cast<char*>(block.data) - slab->data) / block.bytes));
  ++shelf.free, --shelf.taken;
  // Of a device, giving back may wait for it.
  const bool goes = !traits_.deferred || slab->bytes == traits_.returned;
  if (slab->unused() && goes && !slab->held) give_back(shelf, slab);
}

void Arena::give_back(Shelf& shelf, Slab* slab) noexcept {
  give_back(slab->data, slab->bytes);
  shelf.drop(slab);
}

void Arena::trim() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  turn_away();
  holds_ = false;  // but for slabs in use, which stay like any other
  for (auto& [block_bytes, shelf] : shelves_) {
    for (size_t i = shelf.slabs.size(); i-- > 0;) {
      Slab* const slab = shelf.slabs[i].get();
      slab->held = false;
      if (slab->unused()) give_back(shelf, slab);
    }
  }
}

MemoryUse Arena::use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}

int64_t Arena::ready(int64_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto shelf = shelves_.find(rounded(bytes));
  return shelf == shelves_.end() ? 0 : shelf->second.free;
}

int64_t Arena::held(Holds what) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_[size_t(what)];
}

}  // namespace pariskv
