#include "chunks.h"

#include <iterator>

namespace pariskv::cuda {

Chunks::~Chunks() {
  for (auto& [data, piece] : pieces_) source_->deallocate(data, piece_, piece.alignment);
}

void* Chunks::allocate(std::size_t bytes, std::size_t alignment) {
  if (bytes != chunk_) return source_->allocate(bytes, alignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  Piece* found = nullptr;
  if (free_ == 0) {
    found = take_piece(alignment);
    if (found == nullptr) return source_->allocate(bytes, alignment);
  } else {
    // From the first piece on, so that later ones may become free.
    auto piece = pieces_.begin();
    while (piece->second.free.empty()) ++piece;
    found = &piece->second;
  }
  char* data = found->free.back();
  found->free.pop_back();
  --free_;
  return data;
}

Chunks::Piece* Chunks::take_piece(std::size_t alignment) {
  Piece piece{alignment, {}};
  piece.free.reserve(piece_ / chunk_);
  auto* data = static_cast<char*>(source_->allocate(piece_, alignment));
  if (data == nullptr) return nullptr;
  for (std::size_t at = piece_; at >= chunk_; at -= chunk_) {
    piece.free.push_back(data + at - chunk_);
  }
  try {
    Piece& kept = pieces_.emplace(data, std::move(piece)).first->second;
    free_ += kept.free.size();
    return &kept;
  } catch (...) {
    source_->deallocate(data, piece_, alignment);
    throw;
  }
}

void Chunks::deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto* chunk = static_cast<char*>(data);
  const auto after = pieces_.upper_bound(chunk);
  if (bytes != chunk_ || after == pieces_.begin() || chunk >= std::prev(after)->first + piece_) {
    return source_->deallocate(data, bytes, alignment);
  }
  const auto piece = std::prev(after);
  piece->second.free.push_back(chunk);  // there is room
  ++free_;
  if (piece->second.free.size() < piece_ / chunk_) return;
  free_ -= piece->second.free.size();
  source_->deallocate(piece->first, piece_, piece->second.alignment);
  pieces_.erase(piece);
}

}  // namespace pariskv::cuda
