/**
 * A device's memory in one range of addresses: pieces of one size are mapped into it as they are
 * asked for, so that what lies in a piece has a number as well as an address.
 */
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "pariskv/memory.h"

namespace pariskv::cuda {

/** Pieces of a range are multiples of this. */
constexpr int64_t kMappedBytes = int64_t{2} << 20;

class Range : public MemoryResource {
 public:
  /**
   * @param most  bytes that are ever mapped at a time
   * @return null: the driver cannot map memory
   */
  static std::shared_ptr<Range> reserve(int32_t device, int64_t most);
  ~Range() override;

  /** A piece, a multiple of kMappedBytes: at the first place that has room, so that numbers stay
   * low. */
  void* allocate(std::size_t bytes, std::size_t alignment) override;
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  Range(int32_t device, char* data, int64_t bytes);

  const int32_t device_;
  char* const data_;
  const int64_t bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> pieces_;  // by offset: bytes of those that are mapped
};

}  // namespace pariskv::cuda
