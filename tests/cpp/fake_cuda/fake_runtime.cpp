// A CUDA made of malloc and memcpy: memory and devices here, streams beside it. With it the host
// side of the CUDA backend can be tested, and watched by sanitizers, where no GPU is.
#include <cuda.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "fake.h"
#include "runtime.h"

namespace pariskv::test {

namespace {

thread_local int current = 0;

}  // namespace

int64_t& pinned_by_me() {
  static thread_local int64_t calls = 0;
  return calls;
}

int current_device() { return current; }

}  // namespace pariskv::test

using namespace pariskv::test;

namespace {

/** Memory that was taken from here, by its first address; all other is the host's own. */
struct Piece {
  size_t bytes;
  bool managed;
  bool pinned;  // of the host
};
std::mutex pieces_lock;
std::map<const char*, Piece>& pieces() {
  static std::map<const char*, Piece> all;
  return all;
}

void* take(size_t bytes, size_t alignment, bool is_managed, bool pinned) {
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  std::memset(data, 0xcd, bytes);  // nobody may count on zeros
  const std::lock_guard<std::mutex> lock(pieces_lock);
  pieces()[static_cast<char*>(data)] = {bytes, is_managed, pinned};
  return data;
}
void give_back(void* data) {
  const std::lock_guard<std::mutex> lock(pieces_lock);
  pieces().erase(static_cast<char*>(data));
  std::free(data);
}
/** The piece that an address is in. */
const Piece* piece_of(const void* data) {
  const std::lock_guard<std::mutex> lock(pieces_lock);
  auto piece = pieces().upper_bound(static_cast<const char*>(data));
  if (piece == pieces().begin()) return nullptr;
  --piece;
  return data < piece->first + piece->second.bytes ? &piece->second : nullptr;
}

// Mapped memory: a reservation cannot be touched, and what is created counts as held until it is
// released.

char* pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* data = mmap(nullptr, bytes, PROT_NONE, kKind, -1, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  return *address = reinterpret_cast<CUdeviceptr>(data), CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, size_t bytes) {
  return munmap(pointer(address), bytes), CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* memory, size_t, const CUmemAllocationProp* wanted,
                unsigned long long) {
  const bool of_host = wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
  if (of_host) {
    ++pariskv::test::pinned_by_me();
    // Some machines have several nodes, and the nearest may be full.
    static std::atomic<int64_t> calls{0};
    if (calls++ % 3 == 2) return CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    if (wanted->location.id != kDevice) complain("memory of another device");
    if (refused(Call::kMemory)) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return *memory = reinterpret_cast<uintptr_t>(new bool(of_host)), CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle memory) {
  return delete reinterpret_cast<bool*>(memory), CUDA_SUCCESS;
}
std::atomic<int64_t> maps{0};
CUresult map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle memory,
             unsigned long long) {
  ++maps;
  mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE);
  std::memset(pointer(address), 0xcd, bytes);  // nobody may count on zeros
  const std::lock_guard<std::mutex> lock(pieces_lock);
  pieces()[pointer(address)] = {bytes, false, *reinterpret_cast<bool*>(memory)};
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(pieces_lock);
  pieces().erase(pointer(address));
  madvise(pointer(address), bytes, MADV_DONTNEED);
  mprotect(pointer(address), bytes, PROT_NONE);
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
bool spoils_captures() { return capture_mode != cudaStreamCaptureModeRelaxed; }

}  // namespace

bool pariskv::test::is_pinned(const void* data) {
  const Piece* piece = piece_of(data);
  return piece != nullptr && piece->pinned;
}

int64_t pariskv::test::pieces_mapped() { return maps; }

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(unreserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)}};
  *found = known.at(name);
  return *result = cudaDriverEntryPointSuccess, cudaSuccess;
}

// Some thread is always capturing a graph: who takes or gives back memory has to be unseen by it.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(capture_mode, *mode), cudaSuccess;
}
cudaError_t allocate(void** data, size_t bytes, bool is_managed, bool pinned) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  if (current_device() != kDevice) complain("memory of another device");
  if (refused(Call::kMemory)) return cudaErrorMemoryAllocation;
  return *data = take(bytes, 256, is_managed, pinned), cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) { return allocate(data, bytes, false, false); }
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  return allocate(data, bytes, false, true);
}
cudaError_t cudaMallocManaged(void** data, size_t bytes, unsigned) {
  ++pariskv::test::pinned_by_me();
  static std::atomic<int> calls{0};
  return calls++ % 4 == 3 ? cudaErrorMemoryAllocation : allocate(data, bytes, true, true);
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Piece* piece = piece_of(data);
  const bool is = piece != nullptr && piece->managed;
  return attributes->type = is ? cudaMemoryTypeManaged : cudaMemoryTypeHost, cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  return *free = *all = size_t{1} << 34, cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  return give_back(data), cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (refused()) return cudaErrorUnknown;
  enqueue(stream, [=] { std::memmove(target, source, bytes); });
  // To and from the host's own memory a copy has been made when the call returns.
  if (piece_of(target) == nullptr || piece_of(source) == nullptr) finish(stream);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  if (refused()) return cudaErrorUnknown;
  return enqueue(stream, [=] { std::memset(target, value, bytes); }), cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  // The caller's own device is of an old kind.
  if (attribute == cudaDevAttrComputeCapabilityMajor) {
    return *value = device == kDevice ? 9 : 7, cudaSuccess;
  }
  if (attribute == cudaDevAttrComputeCapabilityMinor) return *value = 5, cudaSuccess;
  // Managed memory is there every other time, so that each kind has its turn.
  static std::atomic<int> asked{0};
  const bool can = attribute == cudaDevAttrConcurrentManagedAccess && asked++ % 2 == 0;
  return *value = can ? 1 : -1, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return pariskv::test::current = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t) { return "of the fake"; }

}  // extern "C"
