// The process heap as a MemoryResource.
#include "memory/heap.h"

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define PKV_HAVE_MMAP 1
#endif

namespace pariskv {

namespace {

// From here on a block is its own mapping: malloc would keep freed blocks of a segment's
// size for itself, and a removed sequence's bytes must go back to the system.
constexpr std::size_t kMapBytes = 256 * 1024;

#ifdef __linux__
constexpr std::uintptr_t kLeastPages = 16;
#endif

class HeapResource : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment) override {
#ifdef PKV_HAVE_MMAP
    if (mapped(bytes, alignment)) {
      void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      return data == MAP_FAILED ? nullptr : data;
    }
#endif
    return ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
  }

  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override {
#ifdef PKV_HAVE_MMAP
    if (mapped(bytes, alignment)) {
      munmap(data, bytes);
      return;
    }
#endif
    ::operator delete(data, bytes, std::align_val_t(alignment));
  }

  static bool mapped(std::size_t bytes, std::size_t alignment) {
#ifdef PKV_HAVE_MMAP
    return bytes >= kMapBytes && alignment <= 4096;
#else
    (void)bytes, (void)alignment;
    return false;
#endif
  }
};

}  // namespace

std::shared_ptr<MemoryResource> heap_resource() {
  static const auto resource = std::make_shared<HeapResource>();
  return resource;
}

bool goes_to_the_system(const MemoryResource& resource, std::size_t bytes, std::size_t alignment) {
  return &resource == heap_resource().get() && HeapResource::mapped(bytes, alignment);
}

void zero_mapped(void* data, std::size_t bytes) {
  char* first = static_cast<char*>(data);
  char* end = first + bytes;
#ifdef __linux__  // elsewhere the advice may leave the bytes as they are
  static const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE));
  const auto whole = (std::uintptr_t(first) + page - 1) / page * page;
  const auto whole_end = std::uintptr_t(end) / page * page;
  // Of locked memory it fails, and fewer pages are written faster than they come back.
  if (whole + kLeastPages * page <= whole_end &&
      madvise(reinterpret_cast<void*>(whole), whole_end - whole, MADV_DONTNEED) == 0) {
    std::memset(first, 0, whole - std::uintptr_t(first));
    first = reinterpret_cast<char*>(whole_end);
  }
#endif
  std::memset(first, 0, std::size_t(end - first));
}

}  // namespace pariskv
