/**
 * The library's allocator: slabs for small blocks, whole blocks for large ones, one
 * budget and one set of books. A block is zeroed when it is given back, before anybody
 * else can be handed its bytes.
 */
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/ahead.h"
#include "pariskv/memory.h"

namespace pariskv {

class Arena;
struct Slab;

/** What a block is for, in its arena's books. */
enum class Holds : uint8_t { kOther, kRows, kSummaries, kKept };

/** Owned bytes; gives itself back. Empty when default-made or moved from. */
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    Block(std::move(other)).swap(*this);
    return *this;
  }
  ~Block();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  /** As the arena counts them. */
  int64_t taken() const;

  Holds holds() const { return holds_; }
  /** It is for something else from now on. */
  void hold(Holds what) noexcept;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  friend class Arena;
  void swap(Block& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(slab_, other.slab_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(holds_, other.holds_);
  }

  Arena* arena_ = nullptr;
  Slab* slab_ = nullptr;  // null: taken from the resource on its own
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Holds holds_ = Holds::kOther;
};

/** A freed block that may not be handed out again yet. */
struct RetiredBlock {
  Slab* slab;
  void* data;
  int64_t bytes;  // as taken, alignment included
};

/** Of blocks that a GPU reads. */
constexpr int64_t kDeviceAlignment = 256;

/** The kind of memory of an arena; the defaults are for the heap. */
struct ArenaTraits {
  const char* name = nullptr;  ///< In messages, when there is more than one kind.
  int64_t alignment = 64;
  int64_t slab_bytes = 1 << 20;    ///< The first slab of a size.
  int64_t largest_slab = 1 << 20;  ///< Further slabs of that size double up to here.
  /**
   * Work that the host does not see may still use freed blocks: they wait to be recycled, and
   * slabs stay until trimmed, since giving them back would wait for the device.
   */
  bool deferred = false;
  /**
   * Of a deferred arena: slabs of so many bytes go back as soon as nothing is in them, while work
   * may still zero them. The resource has to stand that. 0: none do.
   */
  int64_t returned = 0;
  /**
   * As much again as is in use is kept for later, of each size up to so many bytes. A thread takes
   * it from the resource, which has to stand that. 0: a slab is taken when it is needed.
   */
  int64_t ahead = 0;
  /** Brings the pages of a slab that is reserved into memory. */
  std::function<void(void* data, int64_t bytes)> touch;
  /** Throws OutOfMemory if the system has no such bytes left for these pages. */
  std::function<void(int64_t bytes)> check_ahead;
  /** Bytes that the system lacks beside an arena that holds so many: unused slabs go back. */
  std::function<int64_t(int64_t reserved)> lacking;
  /** Called with every new slab; where it zeroes them, every block is zeros when handed out. */
  std::function<void(void* data, int64_t bytes)> clear;
  /** Called when there is nothing left, before trying once more. */
  std::function<void()> reclaim;
};

class Arena {
 public:
  /** @param budget the most bytes to hold from `resource` at a time; 0 is no limit. */
  Arena(std::shared_ptr<MemoryResource> resource, int64_t budget, ArenaTraits traits = {});
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /**
   * `bytes` (0 or more) of uninitialised memory, aligned as the traits say.
   * Throws OutOfMemory and changes nothing when the budget or the resource says no.
   */
  Block allocate(int64_t bytes, Holds what = Holds::kOther);

  MemoryUse use() const;

  /** Blocks of so many bytes that are free in slabs. */
  int64_t ready(int64_t bytes) const;

  /** Bytes of the blocks in use that hold this, as they were asked for. */
  int64_t held(Holds what) const;

  /** So many free blocks of a size. */
  struct Stock {
    int64_t block_bytes;
    int64_t blocks;
  };
  /**
   * Takes slabs until all these blocks are free, and touches them. They stay until they are
   * trimmed. Throws OutOfMemory, and has taken nothing, when the budget or the resource says no.
   */
  void reserve(const std::vector<Stock>& stocks);
  /**
   * The same by a thread, one slab after the other: returns at once, and what is to come counts as
   * reserved. Where no thread may take from the resource, it is `reserve`.
   */
  void reserve_behind(const std::vector<Stock>& stocks);
  /** Throws what the budget says to that. */
  void check_reserve(const std::vector<Stock>& stocks) const;

  /** Of a deferred arena: the blocks freed since the last call. */
  std::vector<RetiredBlock> take_retired();

  /** Takes back retired blocks, zeroed by now. */
  void recycle(const RetiredBlock* blocks, size_t count) noexcept;

  /**
   * Sees to it that slabs are taken ahead of need, and given back where the system runs short; to
   * be called now and then. Never waits.
   */
  void tend() noexcept;

  /** Gives slabs without blocks back to the resource. */
  void trim() noexcept;

 private:
  friend class Block;
  static constexpr int64_t kMostShared = 1 << 20;
  int64_t rounded(int64_t bytes) const;
  bool shares_slab(int64_t bytes, Holds what) const {
    // On the heap at most an eighth of a slab is lost to the odd end. Of rows there are many blocks
    // of one size, which the system would have as many mappings for.
    return traits_.deferred || bytes <= traits_.slab_bytes / 8 ||
           (what == Holds::kRows && bytes <= kMostShared && is_small(8 * bytes));
  }
  /** Beside the budget: what is free in a slab is no room for blocks of other sizes. */
  bool is_small(int64_t slab_bytes) const {
    return use_.budget == 0 || slab_bytes <= use_.budget / 32;
  }
  /** Whether a block comes from a slab: of every size that has reserved ones left. */
  bool comes_from_slab(int64_t bytes, Holds what) const {
    const auto shelf = shelves_.find(bytes);
    return shares_slab(bytes, what) || (shelf != shelves_.end() && shelf->second.free > 0);
  }
  /** Of a slab for such blocks: as many as an eighth of it is no more than one. */
  int64_t least_slab(int64_t block_bytes) const {
    const bool few = !traits_.deferred && block_bytes <= kMostShared;
    return std::max(traits_.slab_bytes, few ? 8 * block_bytes : block_bytes);
  }
  Block try_allocate(int64_t bytes, Holds what);
  void* take(int64_t bytes);
  void give_back(void* data, int64_t bytes) noexcept;
  void free(Block& block) noexcept;
  void zero(const RetiredBlock& block) const noexcept;
  void restore(const RetiredBlock& block) noexcept;

  /** All slabs of one block size. */
  struct Shelf {
    std::vector<std::unique_ptr<Slab>> slabs;
    int64_t free = 0;           // free blocks
    int64_t taken = 0;          // and blocks in use
    Slab* with_room = nullptr;  // a list of slabs that have free blocks

    void open(Slab* slab) noexcept;
    void close(Slab* slab) noexcept;
    void add(std::unique_ptr<Slab> slab);
    /** One without blocks. */
    void drop(Slab* slab) noexcept;
  };
  Slab* slab_with_room(int64_t block_bytes);
  int64_t next_slab_bytes(const Shelf& shelf, int64_t block_bytes, int64_t most) const;
  std::unique_ptr<Slab> make_slab(int64_t bytes, int64_t block_bytes);
  Slab* put_up(std::unique_ptr<Slab> slab);
  void give_back(Shelf& shelf, Slab* slab) noexcept;

  /** A slab that is to be reserved. */
  struct Wanted {
    int64_t bytes, block_bytes;
  };
  std::vector<Wanted> wanted_for(const std::vector<Stock>& stocks, int64_t largest) const;
  int64_t reserved_slab() const;
  void take_all(const std::vector<Wanted>& wanted);
  void take_reserved(const Wanted& wanted, std::vector<Slab*>& taken);
  bool runs_low(const Shelf& shelf, int64_t block_bytes) const;
  void ask_ahead();
  bool ask(std::unique_ptr<Slab>& slab);
  void take_in() noexcept;
  void call_off() noexcept;
  void turn_away() noexcept;
  void give_way(int64_t bytes) noexcept;

  std::shared_ptr<MemoryResource> resource_;
  const ArenaTraits traits_;
  mutable std::mutex mutex_;
  MemoryUse use_;
  std::array<int64_t, 4> held_{};     // by what blocks hold
  std::map<int64_t, Shelf> shelves_;  // by block size
  std::vector<RetiredBlock> retired_;
  bool holds_ = false;            // slabs were reserved and not trimmed since
  size_t blocks_out_ = 0;         // retired_ has room for as many, so that freeing cannot fail
  std::unique_ptr<Ahead> ahead_;  // null: nothing is taken ahead
  std::deque<std::unique_ptr<Slab>> coming_;  // asked for ahead, counted as reserved, in order
  bool ahead_refused_ = false;  // not to be asked again before something is given back
};

}  // namespace pariskv
