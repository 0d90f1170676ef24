/**
 * The few CUDA calls that may fail on a healthy machine, behind one table, so that a test can
 * make the Nth of them fail; and small owners of CUDA's handles.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

namespace pariskv::cuda {

/** Throws CudaError "[cuda] what: name (text)" unless `error` is cudaSuccess. */
void check(cudaError_t error, const char* what);

/** The same for the launch just made. */
void check_launch(const char* kernel);

struct Runtime {
  cudaError_t (*malloc)(void** data, size_t bytes);
  cudaError_t (*host_alloc)(void** data, size_t bytes);
  cudaError_t (*copy)(void* target, const void* source, size_t bytes, cudaStream_t stream);
  /** Asked after every launch: what cudaGetLastError says. */
  cudaError_t (*launched)();
};

/** The table in use; tests put their own functions in. */
Runtime& runtime();

/** True on success; otherwise the error is cleared, for it has been told. */
bool succeeded(cudaError_t error) noexcept;

/** Waits for all that a stream was given; `what` for is said when that fails. */
void wait_for(cudaStream_t stream, const char* what);

/** The same for who is failing already: another failure is not told. */
void wait_anyhow(cudaStream_t stream) noexcept;

/** Which stream it is: the handle of one that is gone may be given to another. */
uint64_t name_of(cudaStream_t stream);

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
 * What this thread asks for meanwhile does not spoil graphs that are being captured. Memory, waits
 * and questions whether work is done all would, also of streams that have no part in the graph.
 */
class UnseenByCaptures {
 public:
  UnseenByCaptures() noexcept { succeeded(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~UnseenByCaptures() { succeeded(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  UnseenByCaptures(const UnseenByCaptures&) = delete;
  UnseenByCaptures& operator=(const UnseenByCaptures&) = delete;

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
  void hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "order two streams");
  }
  cudaEvent_t handle() const { return event_; }
  void wait() const {
    const UnseenByCaptures unseen;
    check(cudaEventSynchronize(event_), "wait for an event");
  }
  bool passed() const {
    const UnseenByCaptures unseen;
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
  OwnStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  }
  ~OwnStream() { succeeded(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace pariskv::cuda
