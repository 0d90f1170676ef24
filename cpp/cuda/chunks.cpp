#include "chunks.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "memory/arena.h"

namespace pariskv::cuda {

Chunks::~Chunks() {
  for (auto& [data, piece] : pieces_) source_->deallocate(data, piece.bytes, piece.alignment);
}

void* Chunks::allocate(std::size_t bytes, std::size_t alignment) {
  if (bytes != chunk_) return others_->allocate(bytes, alignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  Piece* found = nullptr;
  if (free_ == 0) {
    found = take_piece(alignment);
    if (found == nullptr) return nullptr;
  } else {
    // From the first piece on, so that later ones may become free.
    auto piece = pieces_.lower_bound(first_free_);
    while (piece->second.free.empty()) ++piece;
    first_free_ = piece->first;
    found = &piece->second;
  }
  char* data = found->free.back();
  found->free.pop_back();
  --free_;
  return data;
}

Chunks::Piece* Chunks::take_piece(std::size_t alignment) {
  std::size_t bytes = least_;
  for (std::size_t i = 0; i < pieces_.size() && 2 * bytes <= most_; ++i) bytes *= 2;
  char* data = nullptr;
  for (;; bytes = std::max(least_, bytes / 2 / least_ * least_)) {  // a smaller one may be had
    data = static_cast<char*>(source_->allocate(bytes, alignment));
    if (data != nullptr) break;
    if (bytes == least_) return nullptr;
  }
  try {
    Piece piece{bytes, alignment, {}, false};
    piece.free.reserve(bytes / chunk_);
    for (std::size_t at = bytes; at >= chunk_; at -= chunk_) {
      piece.free.push_back(data + at - chunk_);
    }
    Piece& kept = pieces_.emplace(data, std::move(piece)).first->second;
    all_ += bytes;
    free_ += kept.free.size();
    first_free_ = std::min(first_free_, data);
    return &kept;
  } catch (...) {
    source_->deallocate(data, bytes, alignment);
    throw;
  }
}

Chunks::Pieces::iterator Chunks::piece_of(const void* chunk) {
  auto* const data = static_cast<char*>(const_cast<void*>(chunk));
  const auto after = pieces_.upper_bound(data);
  if (after == pieces_.begin()) return pieces_.end();
  const auto piece = std::prev(after);
  return data < piece->first + piece->second.bytes ? piece : pieces_.end();
}

Chunks::Fresh Chunks::fresh(void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = bytes == chunk_ ? piece_of(data) : pieces_.end();
  if (piece == pieces_.end()) return {data, bytes};
  if (piece->second.zeros) return {nullptr, 0};
  piece->second.zeros = true;
  return {piece->first, piece->second.bytes};
}

void Chunks::deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = bytes == chunk_ ? piece_of(data) : pieces_.end();
  if (piece == pieces_.end()) return others_->deallocate(data, bytes, alignment);
  piece->second.free.push_back(static_cast<char*>(data));  // there is room
  ++free_;
  first_free_ = std::min(first_free_, piece->first);
  release_unused(piece);
}

Chunks::Pieces::iterator Chunks::release_unused(Pieces::iterator piece) {
  const Piece& own = piece->second;
  if (own.free.size() < own.bytes / chunk_ || all_ - own.bytes < held_) return std::next(piece);
  free_ -= own.free.size(), all_ -= own.bytes;
  source_->deallocate(piece->first, own.bytes, own.alignment);
  return pieces_.erase(piece);
}

bool Chunks::hold(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t before = std::exchange(held_, bytes);
  bool there = true;
  try {
    while (there && all_ < bytes) there = take_piece(std::size_t(kDeviceAlignment)) != nullptr;
  } catch (const std::bad_alloc&) {
    there = false;
  }
  if (!there) held_ = before;
  for (auto piece = pieces_.begin(); piece != pieces_.end();) piece = release_unused(piece);
  return there;
}

}  // namespace pariskv::cuda
