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
   * @param pieces  where pieces come from, whole ones alone
   * @param others  where anything else than a chunk comes from
   * @param chunk   what is asked for most often
   * @param least, most  what is taken of `pieces` at a time, multiples of it: twice as much each
   * time
   * @param budget  that pieces and others together stay in, as long as a piece can go; 0: none
   */
  Chunks(std::shared_ptr<MemoryResource> pieces, std::shared_ptr<MemoryResource> others,
         std::size_t chunk, std::size_t least, std::size_t most, std::size_t budget = 0)
      : source_(std::move(pieces)),
        others_(std::move(others)),
        chunk_(chunk),
        least_(least),
        most_(most),
        budget_(budget) {}
  ~Chunks() override;

  /** Null for anything else than a chunk means as well that `make_way` is to be called first. */
  void* allocate(std::size_t bytes, std::size_t alignment) override;
  /** Never waits: pieces without a chunk in use stay, for work on the device may still zero them.
   */
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override;

  /** Gives pieces without a chunk in use back for what was refused last. Of zeroed chunks alone. */
  void make_way() noexcept;

  /** Memory that is to be zeros before it is used. */
  struct Fresh {
    void* data;
    std::size_t bytes;
  };
  /**
   * What has to be zeroed for a block that was just handed out: of a chunk all of its piece, for
   * the first of its chunks alone, since those that come back are zeros.
   */
  Fresh fresh(void* data, std::size_t bytes);
  /** It has been. */
  void note_zeros(void* data, std::size_t bytes);

  /**
   * Takes pieces until so many bytes are there, and keeps these from now on, in use or not. False:
   * the source has no more; then it keeps what it kept before.
   */
  bool hold(std::size_t bytes);
  /** Gives all other pieces without a chunk in use back. Of zeroed chunks alone. */
  void trim() noexcept;

 private:
  struct Piece {
    std::size_t bytes, alignment;
    std::vector<char*> free;
    bool zeros = false;
  };
  using Pieces = std::map<char*, Piece>;

  /** Of no more than `most` bytes, or of the least there is. Null: the source has none. */
  Piece* take_piece(std::size_t alignment, std::size_t most);
  /** The piece of a chunk; the end: it is of none. */
  Pieces::iterator piece_of(const void* chunk);
  bool unused(const Piece& piece) const { return piece.free.size() == piece.bytes / chunk_; }
  /** Returns the next. */
  Pieces::iterator release(Pieces::iterator piece) noexcept;

  const std::shared_ptr<MemoryResource> source_, others_;
  const std::size_t chunk_, least_, most_, budget_;
  std::mutex mutex_;
  Pieces pieces_;
  std::size_t all_ = 0;   // bytes of all pieces
  std::size_t held_ = 0;  // bytes that stay
  std::size_t others_bytes_ = 0;
  std::size_t refused_ = 0;     // of others, the last time
  std::size_t free_ = 0;        // chunks
  char* first_free_ = nullptr;  // no piece before it has any
};

}  // namespace pariskv::cuda
