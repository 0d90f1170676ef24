// A CUDA made of malloc and memcpy: work is done when it is enqueued, events pass late. With it the
// host side of the CUDA backend can be tested, and watched by sanitizers, where no GPU is.
#include <cuda.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "fake.h"
#include "runtime.h"

namespace pariskv::test {

int64_t& pinned_by_me() {
  static thread_local int64_t calls = 0;
  return calls;
}

}  // namespace pariskv::test

namespace {

/** How many more times an event says that it has not passed. */
struct FakeEvent {
  int left;
};

FakeEvent* of(cudaEvent_t event) { return reinterpret_cast<FakeEvent*>(event); }

/** Managed memory: what else it is, is known by its address alone. */
std::mutex managed_lock;
std::set<const void*>& managed() {
  static std::set<const void*> addresses;
  return addresses;
}

// Mapped memory: a reservation is the memory, and what is created counts as held until released.

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                 unsigned long long) {
  void* data = std::aligned_alloc(alignment, bytes);
  std::memset(data, 0xcd, bytes);
  return *address = reinterpret_cast<CUdeviceptr>(data), CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, size_t) {
  return std::free(reinterpret_cast<void*>(address)), CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* memory, size_t, const CUmemAllocationProp*,
                unsigned long long) {
  ++pariskv::test::pinned_by_me();
  // Some machines have several nodes, and the nearest may be full.
  static std::atomic<int64_t> calls{0};
  if (calls++ % 3 == 2) return CUDA_ERROR_OUT_OF_MEMORY;
  return *memory = reinterpret_cast<uintptr_t>(new int(0)), CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle memory) {
  return delete reinterpret_cast<int*>(memory), CUDA_SUCCESS;
}
CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
bool spoils_captures() { return capture_mode != cudaStreamCaptureModeRelaxed; }

}  // namespace

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
cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*data, 0xcd, bytes);  // nobody may count on zeros
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) { return cudaMalloc(data, bytes); }
cudaError_t cudaMallocManaged(void** data, size_t bytes, unsigned) {
  ++pariskv::test::pinned_by_me();
  const std::lock_guard<std::mutex> lock(managed_lock);
  static int calls = 0;
  if (calls++ % 4 == 3) return cudaErrorMemoryAllocation;
  return cudaMalloc(data, bytes), managed().insert(*data), cudaSuccess;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard<std::mutex> lock(managed_lock);
  const bool is = managed().count(data) > 0;
  return attributes->type = is ? cudaMemoryTypeManaged : cudaMemoryTypeHost, cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard<std::mutex> lock(managed_lock);
  return managed().erase(data), std::free(data), cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  return std::memmove(target, source, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  return std::memset(target, value, bytes), cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  static intptr_t next = 1000;
  return *stream = reinterpret_cast<cudaStream_t>(next++), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captured = stream == pariskv::test::kCapturedStream;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new FakeEvent{0}), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete of(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return of(event)->left = std::rand() % 3, cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return of(event)->left = 0, cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return of(event)->left-- > 0 ? cudaErrorNotReady : (of(event)->left = 0, cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // Managed memory is there every other time, so that each kind has its turn.
  static std::atomic<int> asked{0};
  const bool can = attribute == cudaDevAttrConcurrentManagedAccess && asked++ % 2 == 0;
  return *value = can ? 1 : -1, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t) { return "of the fake"; }

}  // extern "C"
