#include "runtime.h"

#include <string>

#include "driver.h"
#include "kernels.h"
#include "pariskv/error.h"
#include "pinned.h"

namespace pariskv::cuda {

namespace {

cudaError_t copy_async(void* target, const void* source, size_t bytes, cudaStream_t stream) {
  if (is_managed(target) || is_managed(source)) {
    const RowCopy copy{target, source, int64_t(bytes)};
    launch_copies(&copy, bytes == 0 ? 0 : 1, stream);
    return cudaSuccess;
  }
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream);
}

cudaError_t copy_rows_async(const RowCopy* copies, int64_t count, cudaStream_t stream) {
  const bool managed = count > 0 && (is_managed(copies->target) || is_managed(copies->source));
  if (managed) {
    launch_copies(copies, count, stream);
    return cudaSuccess;
  }
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t error = cudaMemcpyAsync(copies[i].target, copies[i].source,
                                              size_t(copies[i].bytes), cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t device_malloc(void** data, size_t bytes) { return cudaMalloc(data, bytes); }

cudaError_t map_device(void* data, size_t bytes, int32_t device) {
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CUmemGenericAllocationHandle memory{};
  if (driver().create(&memory, bytes, &properties, 0) != CUDA_SUCCESS) {
    return cudaErrorMemoryAllocation;
  }
  const bool mapped = driver().map(address, bytes, 0, memory, 0) == CUDA_SUCCESS;
  driver().release(memory);  // it lives as long as it is mapped
  if (!mapped) return cudaErrorMemoryAllocation;
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (driver().set_access(address, bytes, &access, 1) == CUDA_SUCCESS) return cudaSuccess;
  driver().unmap(address, bytes);
  return cudaErrorMemoryAllocation;
}

}  // namespace

Runtime& runtime() {
  static Runtime table{device_malloc, allocate_pinned, map_device,
                       copy_async,    copy_rows_async, cudaGetLastError};
  return table;
}

bool succeeded(cudaError_t error) noexcept {
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

void check(cudaError_t error, const char* what) {
  // The runtime would report the error again later; one that can be recovered from ends here.
  if (succeeded(error)) return;
  throw CudaError(std::string("[cuda] ") + what + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) + ")");
}

void check_launch(const char* kernel) { check(runtime().launched(), kernel); }

void wait_for(cudaStream_t stream, const char* what) {
  const RelaxedCaptureMode relaxed;
  check(cudaStreamSynchronize(stream), what);
}

void sync_ignoring_errors(cudaStream_t stream) noexcept {
  const RelaxedCaptureMode relaxed;
  succeeded(cudaStreamSynchronize(stream));
}

uint64_t stream_id(cudaStream_t stream) {
  unsigned long long id = 0;
  check(cudaStreamGetId(stream, &id), "identify a stream");
  return id;
}

}  // namespace pariskv::cuda
