#include "pinned.h"

#include "driver.h"
#include "memory/touch.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

// What is mapped comes in pieces of this size, on every device that can do it.
constexpr size_t kPiece = size_t{2} << 20;

size_t whole_pieces(size_t bytes) { return (bytes + kPiece - 1) / kPiece * kPiece; }

int near_node(int device) {
  int node = 0;
  const bool known = succeeded(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device));
  return known && node >= 0 ? node : 0;
}

bool advise(void* data, size_t bytes, cudaMemoryAdvise what, cudaMemLocation where) {
#if CUDART_VERSION >= 13000
  return succeeded(cudaMemAdvise(data, bytes, what, where));
#else
  return succeeded(cudaMemAdvise_v2(data, bytes, what, where));
#endif
}

/** Managed memory, where host and device may use it at the same time; null: there is none. */
void* allocate_managed(size_t bytes, int device) {
  int can = 0;
  if (!succeeded(cudaDeviceGetAttribute(&can, cudaDevAttrConcurrentManagedAccess, device)) ||
      can <= 0) {
    return nullptr;
  }
  void* data = nullptr;
  if (!succeeded(cudaMallocManaged(&data, bytes, cudaMemAttachGlobal))) return nullptr;
  constexpr auto kPrefer = cudaMemAdviseSetPreferredLocation, kMap = cudaMemAdviseSetAccessedBy;
  if (advise(data, bytes, kPrefer, {cudaMemLocationTypeHostNuma, near_node(device)}) ||
      advise(data, bytes, kPrefer, {cudaMemLocationTypeHost, 0})) {
    // Pages are there once they have been touched, and are mapped as large as they are then.
    // One thread clears 2.4 GB a second.
    touch_pages(data, int64_t(bytes));
    if (advise(data, bytes, kMap, {cudaMemLocationTypeDevice, device})) return data;
  }
  succeeded(cudaFree(data));
  return nullptr;
}

CUmemAllocationProp memory_of_node(int node) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, node};
  return properties;
}

class Mapper {
 public:
  /** Whether there is such memory here is found out by taking some. */
  Mapper() {
    void* data = nullptr;
    works_ = driver_.complete && allocate(&data, kPiece) == cudaSuccess;
    if (works_) free(data, kPiece);
  }
  bool works() const { return works_; }

  cudaError_t allocate(void** data, size_t bytes) const {
    int device = 0;
    if (!succeeded(cudaGetDevice(&device))) return cudaErrorNotSupported;
    bytes = whole_pieces(bytes);
    CUdeviceptr address = 0;
    if (driver_.reserve(&address, bytes, kPiece, 0, 0) != CUDA_SUCCESS) {
      return cudaErrorMemoryAllocation;
    }
    if (!fill(address, bytes, device, near_node(device))) {
      driver_.unreserve(address, bytes);
      return cudaErrorMemoryAllocation;
    }
    *data = reinterpret_cast<void*>(address);
    return cudaSuccess;
  }

  cudaError_t free(void* data, size_t bytes) const {
    const auto address = reinterpret_cast<CUdeviceptr>(data);
    bytes = whole_pieces(bytes);
    const bool done = driver_.unmap(address, bytes) == CUDA_SUCCESS &&
                      driver_.unreserve(address, bytes) == CUDA_SUCCESS;
    return done ? cudaSuccess : cudaErrorInvalidValue;
  }

 private:
  /** From the node nearest to the device, or from whichever has any. */
  bool fill(CUdeviceptr address, size_t bytes, int device, int near) const {
    constexpr int kNodes = 16;
    for (int i = 0; i <= kNodes; ++i) {
      const int node = i == 0 ? near : i - 1;
      if (i > 0 && node == near) continue;
      const CUmemAllocationProp properties = memory_of_node(node);
      CUmemGenericAllocationHandle memory{};
      if (driver_.create(&memory, bytes, &properties, 0) != CUDA_SUCCESS) continue;
      const bool mapped = driver_.map(address, bytes, 0, memory, 0) == CUDA_SUCCESS;
      driver_.release(memory);  // it lives as long as it is mapped
      if (!mapped) return false;
      CUmemAccessDesc access[2]{};
      access[0].location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
      access[1].location = properties.location;
      for (CUmemAccessDesc& who : access) who.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      if (driver_.set_access(address, bytes, access, 2) == CUDA_SUCCESS) return true;
      driver_.unmap(address, bytes);
      return false;
    }
    return false;
  }

  const Driver& driver_ = driver();
  bool works_;
};

const Mapper& mapper() {
  static const Mapper mapper;
  return mapper;
}

}  // namespace

cudaError_t allocate_pinned(void** data, size_t bytes) {
  const RelaxedCaptureMode relaxed;
  int device = 0;
  if (succeeded(cudaGetDevice(&device))) {
    *data = allocate_managed(whole_pieces(bytes), device);
    if (*data != nullptr) return cudaSuccess;
  }
  if (mapper().works()) return mapper().allocate(data, bytes);
  return cudaHostAlloc(data, bytes, cudaHostAllocPortable);
}

bool is_managed(const void* data) {
  const RelaxedCaptureMode relaxed;
  cudaPointerAttributes attributes{};
  return succeeded(cudaPointerGetAttributes(&attributes, data)) &&
         attributes.type == cudaMemoryTypeManaged;
}

cudaError_t free_pinned(void* data, size_t bytes) {
  const RelaxedCaptureMode relaxed;
  if (is_managed(data)) return cudaFree(data);
  return mapper().works() ? mapper().free(data, bytes) : cudaFreeHost(data);
}

}  // namespace pariskv::cuda
