/**
 * The device's memory of one cache, and how it is cut: into pieces of chunks, and these into pages.
 * A page is the plain rows of a segment. The arena's slabs are chunks, so that the room of rows can
 * be had by blocks of other sizes; and pages lie in one range of addresses, so that they have
 * numbers.
 */
#pragma once

#include <cstdint>
#include <memory>

#include "chunks.h"
#include "pariskv/config.h"
#include "pariskv/memory.h"
#include "range.h"

namespace pariskv::cuda {

class DeviceMemory {
 public:
  DeviceMemory(const Config& config, const Resources& resources);

  std::shared_ptr<MemoryResource> resource() const { return resource_; }
  int64_t budget() const { return budget_; }
  /** Bytes of a slab; 0: slabs are as ever. */
  int64_t chunk() const { return cut_.chunk; }

  /** What has to be zeroed before a new slab is used. */
  Chunks::Fresh fresh(void* data, int64_t bytes) {
    return chunks_ ? chunks_->fresh(data, size_t(bytes)) : Chunks::Fresh{data, size_t(bytes)};
  }

  void note_zeros(void* data, int64_t bytes) {
    if (chunks_) chunks_->note_zeros(data, size_t(bytes));
  }

  /** Whether `hold` may be called. */
  bool holds() const { return chunks_ != nullptr; }
  /** See Chunks::hold. */
  bool hold(int64_t bytes) { return chunks_->hold(size_t(bytes)); }
  /** Gives back what is not in use. Nothing may be zeroing it any more. */
  void trim() noexcept {
    if (chunks_) chunks_->hold(0), chunks_->trim();
  }
  /** The same, as much as was refused last. */
  void make_way() noexcept {
    if (chunks_) chunks_->make_way();
  }

  /** Where pages lie, one every `page_bytes`; null: they have no numbers. */
  char* pages() const { return range_ ? range_->data() : nullptr; }
  int64_t page_bytes() const { return cut_.page; }
  int64_t page_count() const { return range_ ? range_->bytes() / cut_.page : 0; }

 private:
  struct Cut {
    int64_t least = 0, most = 0;  // bytes of a piece, multiples of a chunk's
    int64_t chunk = 0;            // the same, of a page's
    int64_t page = 0;
  };
  static Cut cut_of(const Config& config, int64_t most);

  const int64_t budget_;
  Cut cut_;
  std::shared_ptr<Range> range_;
  std::shared_ptr<Chunks> chunks_;
  std::shared_ptr<MemoryResource> resource_;
};

}  // namespace pariskv::cuda
