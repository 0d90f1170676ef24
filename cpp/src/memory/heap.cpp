// The process heap as a MemoryResource.
#include "memory/heap.h"

#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define PKV_HAVE_MMAP 1
#endif

namespace pariskv {

namespace {

// From here on a block is its own mapping: malloc would keep freed blocks of a segment's
// size for itself, and a removed sequence's bytes must go back to the system.
constexpr std::size_t kMapBytes = 256 * 1024;

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

}  // namespace pariskv
