/** Work of a recorded step that runs only where a kernel before it has said so. */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pariskv::cuda {

/**
 * A condition of the graph that a stream is being captured into, false unless a kernel sets it. A
 * driver without conditions leaves it without a handle, and the work is recorded as ever.
 */
class Conditional {
 public:
  explicit Conditional(cudaStream_t stream);

  /** For device::ptx::set_condition; 0: there is none. */
  uint64_t handle() const { return handle_; }

  /** Records the work that `run(stream)` gives `inner`, a stream of the library's own; or the
   * stream. */
  template <typename Run>
  void record(cudaStream_t inner, Run run) {
    if (handle_ == 0) return run(stream_);
    begin(inner);
    try {
      run(inner);
    } catch (...) {
      abandon(inner);
      throw;
    }
    end(inner);
  }

 private:
  void begin(cudaStream_t inner);
  void end(cudaStream_t inner);
  static void abandon(cudaStream_t inner) noexcept;

  cudaStream_t stream_;
  uint64_t handle_ = 0;
  cudaGraphNode_t node_ = nullptr;  // the condition's, once it has begun
};

}  // namespace pariskv::cuda
