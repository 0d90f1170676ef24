#include "runtime.h"

#include <string>

#include "kernels.h"
#include "pariskv/error.h"
#include "pinned.h"

namespace pariskv::cuda {

namespace {

cudaError_t copy_async(void* target, const void* source, size_t bytes, cudaStream_t stream) {
  if (is_managed(target) || is_managed(source)) {
    launch_copy(target, source, int64_t(bytes), stream);
    return cudaSuccess;
  }
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream);
}

cudaError_t device_malloc(void** data, size_t bytes) { return cudaMalloc(data, bytes); }

}  // namespace

Runtime& runtime() {
  static Runtime table{device_malloc, allocate_pinned, copy_async, cudaGetLastError};
  return table;
}

bool succeeded(cudaError_t error) noexcept {
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

void check(cudaError_t error, const char* what) {
  // The runtime keeps the error for whoever asks next; one that can be recovered from ends here.
  if (succeeded(error)) return;
  throw CudaError(std::string("[cuda] ") + what + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) + ")");
}

void check_launch(const char* kernel) { check(runtime().launched(), kernel); }

void wait_for(cudaStream_t stream, const char* what) {
  const UnseenByCaptures unseen;
  check(cudaStreamSynchronize(stream), what);
}

void wait_anyhow(cudaStream_t stream) noexcept {
  const UnseenByCaptures unseen;
  succeeded(cudaStreamSynchronize(stream));
}

uint64_t name_of(cudaStream_t stream) {
  unsigned long long name = 0;
  check(cudaStreamGetId(stream, &name), "know a stream");
  return name;
}

}  // namespace pariskv::cuda
