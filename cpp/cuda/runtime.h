/**
 * The few CUDA calls that may fail on a healthy machine, behind one table, so that a test can
 * make the Nth of them fail; and small owners of CUDA's handles.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

namespace pariskv {
struct RowCopy;
}

namespace pariskv::cuda {

/** Throws CudaError "[cuda] what: name (text)" unless `error` is cudaSuccess. */
void check(cudaError_t error, const char* what);

/** The same for the launch just made. */
void check_launch(const char* kernel);

struct Runtime {
  cudaError_t (*malloc)(void** data, size_t bytes);
  cudaError_t (*host_alloc)(void** data, size_t bytes);
  /** Memory of a device, at addresses that were reserved. */
  cudaError_t (*map)(void* data, size_t bytes, int32_t device);
  cudaError_t (*copy)(void* target, const void* source, size_t bytes, cudaStream_t stream);
  /** Several, all of them from device memory to the host's, or all of them back. */
  cudaError_t (*copy_rows)(const RowCopy* copies, int64_t count, cudaStream_t stream);
  /** Checks cudaGetLastError, after every launch. */
  cudaError_t (*launched)();
};

/** The table in use; tests put their own functions in. */
Runtime& runtime();

/** True on success; otherwise the error is cleared. */
bool succeeded(cudaError_t error) noexcept;

/** Waits for all work of a stream; an error names `what` was waited for. */
void wait_for(cudaStream_t stream, const char* what);

/** The same on error paths: ignores further failures. */
void sync_ignoring_errors(cudaStream_t stream) noexcept;

/** Unlike its handle, the id of a destroyed stream is never used again. */
uint64_t stream_id(cudaStream_t stream);

/** Makes a device current for a while. */
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) noexcept : device_(device) {
    succeeded(cudaGetDevice(&before_));
    if (before_ != device_) succeeded(cudaSetDevice(device_));
  }
  ~DeviceGuard() {
    if (before_ != device_) succeeded(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const int32_t device_;
  int32_t before_ = 0;
};

/**
 * Calls of this thread do not invalidate graphs that other threads capture meanwhile. Allocations,
 * waits and event queries would, even on streams that have no part in the graph.
 */
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() noexcept { succeeded(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCaptureMode() { succeeded(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // and then the one before
};

/** An event that orders work and takes no time. */
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event"); }
  ~Event() {
    if (event_ != nullptr) succeeded(cudaEventDestroy(event_));
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "record an event"); }
  /** Work that `stream` is given from now on comes after the event. */
  void make_wait(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "order two streams");
  }
  cudaEvent_t handle() const { return event_; }
  void wait() const {
    const RelaxedCaptureMode relaxed;
    check(cudaEventSynchronize(event_), "wait for an event");
  }
  bool passed() const {
    const RelaxedCaptureMode relaxed;
    const cudaError_t error = cudaEventQuery(event_);
    if (error != cudaErrorNotReady) check(error, "ask for an event");
    return succeeded(error);  // "not ready" counts as an error until it is cleared
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/** A stream of the library's own. */
class OwnStream {
 public:
  /** @param urgent  its blocks come before blocks of other kernels that wait for a place */
  explicit OwnStream(bool urgent = false) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "ask for a device's limits");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least),
          "create a stream");
  }
  ~OwnStream() { succeeded(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace pariskv::cuda
