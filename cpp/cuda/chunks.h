/**
 * Memory of another resource in chunks of one size: blocks of different sizes that come and go
 * leave no holes that only their own size fits in.
 */
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "pariskv/memory.h"

namespace pariskv::cuda {

class Chunks : public MemoryResource {
 public:
  /**
   * @param chunk  what is asked for most often; anything else comes from `source` as it is
   * @param piece  what is taken of `source` at a time, a multiple of it
   */
  Chunks(std::shared_ptr<MemoryResource> source, std::size_t chunk, std::size_t piece)
      : source_(std::move(source)), chunk_(chunk), piece_(piece) {}
  ~Chunks() override;

  void* allocate(std::size_t bytes, std::size_t alignment) override;
  /** A piece none of whose chunks is in use goes back to the source. */
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override;

 private:
  struct Piece {
    std::size_t alignment;
    std::vector<char*> free;
  };
  using Pieces = std::map<char*, Piece>;

  /** Null: the source has none. */
  Piece* take_piece(std::size_t alignment);

  const std::shared_ptr<MemoryResource> source_;
  const std::size_t chunk_, piece_;
  std::mutex mutex_;
  Pieces pieces_;
  std::size_t free_ = 0;  // chunks
};

}  // namespace pariskv::cuda
