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
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes != chunk_) {
    const auto can_go = [&](const auto& entry) { return unused(entry.second); };
    const std::size_t wanted = all_ + others_bytes_ + bytes;
    const bool over = budget_ > 0 && wanted > budget_;
    void* data = nullptr;
    if (!over || std::none_of(pieces_.begin(), pieces_.end(), can_go)) {
      data = others_->allocate(bytes, alignment);
    }
    refused_ = data == nullptr ? std::max(bytes, over ? wanted - budget_ : 0) : 0;
    if (data != nullptr) others_bytes_ += bytes;
    return data;
  }
  Piece* found = nullptr;
  if (free_ == 0) {
    found = take_piece(alignment, most_);
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

Chunks::Piece* Chunks::take_piece(std::size_t alignment, std::size_t most) {
  std::size_t bytes = least_;
  for (std::size_t i = 0; i < pieces_.size() && 2 * bytes <= most; ++i) bytes *= 2;
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
  return {piece->first, piece->second.bytes};
}

void Chunks::note_zeros(void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = bytes == chunk_ ? piece_of(data) : pieces_.end();
  if (piece != pieces_.end()) piece->second.zeros = true;
}

void Chunks::deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = bytes == chunk_ ? piece_of(data) : pieces_.end();
  if (piece == pieces_.end()) {
    others_bytes_ -= bytes;
    return others_->deallocate(data, bytes, alignment);
  }
  piece->second.free.push_back(static_cast<char*>(data));  // there is room
  ++free_;
  first_free_ = std::min(first_free_, piece->first);
}

Chunks::Pieces::iterator Chunks::release(Pieces::iterator piece) noexcept {
  const Piece& own = piece->second;
  free_ -= own.free.size(), all_ -= own.bytes;
  source_->deallocate(piece->first, own.bytes, own.alignment);
  return pieces_.erase(piece);
}

bool Chunks::hold(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t before = std::exchange(held_, bytes);
  bool there = true;
  try {
    while (there && all_ < bytes) {
      const std::size_t left = std::min(bytes - all_, most_);
      there = take_piece(std::size_t(kDeviceAlignment), left) != nullptr;
    }
  } catch (const std::bad_alloc&) {
    there = false;
  }
  if (there) return true;
  held_ = before;
  // What was taken has not been used: nothing zeroes it.
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const Piece& own = piece->second;
    const bool goes = unused(own) && !own.zeros && all_ - own.bytes >= held_;
    piece = goes ? release(piece) : std::next(piece);
  }
  return false;
}

void Chunks::trim() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const bool goes = unused(piece->second) && all_ - piece->second.bytes >= held_;
    piece = goes ? release(piece) : std::next(piece);
  }
}

void Chunks::make_way() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto piece = pieces_.begin(); piece != pieces_.end() && refused_ > 0;) {
    if (!unused(piece->second)) {
      ++piece;
      continue;
    }
    refused_ -= std::min(refused_, piece->second.bytes);
    piece = release(piece);
  }
}

}  // namespace pariskv::cuda
