// Blocks that are taken from the resource before anybody asks for them.
#include <algorithm>
#include <string>

#include "memory/arena.h"
#include "memory/slab.h"
#include "pariskv/error.h"

namespace pariskv {

namespace {

// Of slabs of the heap that are reserved: several threads touch one.
constexpr int64_t kReservedSlab = int64_t{64} << 20;

}  // namespace

int64_t Arena::reserved_slab() const {
  return traits_.deferred ? traits_.largest_slab : kReservedSlab;
}

std::vector<Arena::Wanted> Arena::wanted_for(const std::vector<Stock>& stocks,
                                             int64_t largest) const {
  std::vector<Wanted> wanted;
  int64_t bytes = 0;
  for (const Stock& stock : stocks) {
    const int64_t size = rounded(stock.block_bytes), at_once = std::max<int64_t>(largest / size, 1);
    const auto shelf = shelves_.find(size);
    int64_t left = stock.blocks - (shelf == shelves_.end() ? 0 : shelf->second.free);
    for (const auto& slab : coming_) left -= slab->block_bytes == size ? slab->bytes / size : 0;
    for (; left > 0; left -= at_once) {
      wanted.push_back({std::max(std::min(left, at_once) * size, traits_.slab_bytes), size});
      bytes += wanted.back().bytes;
    }
  }
  if (use_.budget > 0 && bytes > use_.budget - use_.reserved) {
    const std::string kind = traits_.name == nullptr ? "" : std::string(" of ") + traits_.name;
    throw OutOfMemory("[reserve] asked for " + std::to_string(bytes) + " bytes" + kind +
                      " ahead, but only " + std::to_string(use_.budget - use_.reserved) +
                      " of the budget of " + std::to_string(use_.budget) +
                      " are free; reserve less or raise the budget");
  }
  if (bytes > 0 && traits_.check_ahead) traits_.check_ahead(bytes);
  return wanted;
}

void Arena::check_reserve(const std::vector<Stock>& stocks) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  wanted_for(stocks, reserved_slab());
}

void Arena::reserve(const std::vector<Stock>& stocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  take_all(wanted_for(stocks, reserved_slab()));
}

void Arena::reserve_behind(const std::vector<Stock>& stocks) {
  if (!ahead_) return reserve(stocks);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Wanted> wanted = wanted_for(stocks, std::min(kAheadSlab, traits_.largest_slab));
  try {
    for (; !wanted.empty(); wanted.pop_back()) {
      std::unique_ptr<Slab> slab = make_slab(wanted.back().bytes, wanted.back().block_bytes);
      slab->held = true;
      if (!ask(slab)) break;
      holds_ = true;
    }
    take_all(wanted);  // for which there is no thread
  } catch (...) {
    turn_away();
    throw;
  }
}

/** All of these slabs, or none. */
void Arena::take_all(const std::vector<Wanted>& wanted) {
  std::vector<Slab*> taken;
  taken.reserve(wanted.size());
  try {
    for (const Wanted& slab : wanted) take_reserved(slab, taken);
  } catch (...) {
    for (Slab* slab : taken) give_back(shelves_[slab->block_bytes], slab);
    throw;
  }
  holds_ = holds_ || !taken.empty();
}

void Arena::take_reserved(const Wanted& wanted, std::vector<Slab*>& taken) {
  std::unique_ptr<Slab> slab = make_slab(wanted.bytes, wanted.block_bytes);
  slab->data = static_cast<char*>(take(wanted.bytes));
  slab->held = true;
  try {
    if (traits_.touch) traits_.touch(slab->data, wanted.bytes);
  } catch (...) {
    give_back(slab->data, wanted.bytes);
    throw;
  }
  taken.push_back(put_up(std::move(slab)));
}

}  // namespace pariskv
