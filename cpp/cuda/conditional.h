/** Work of a recorded step of which a kernel before it says what runs, if any. */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pariskv::cuda {

/**
 * A choice in the graph that a stream is being captured into: one of some bodies runs, or none
 * unless a kernel sets it. Drivers that know no choice among several leave it one body, those
 * without conditions no handle, and the first body is recorded as ever.
 */
class Conditional {
 public:
  Conditional(cudaStream_t stream, int bodies);

  /**
   * For device::ptx::set_condition, with 1 where there is one body, else the number of a body; 0:
   * there is nothing to set.
   */
  uint64_t handle() const { return handle_; }
  int bodies() const { return bodies_; }

  /**
   * Records the work that `run(body, stream)` gives `inner`, a stream of the library's own; or the
   * stream.
   */
  template <typename Run>
  void record(cudaStream_t inner, Run run) {
    if (handle_ == 0) return run(0, stream_);
    add_node();
    for (int body = 0; body < bodies_; ++body) {
      begin(body, inner);
      try {
        run(body, inner);
      } catch (...) {
        abandon(inner);
        throw;
      }
      end(inner);
    }
    follow();
  }

 private:
  void add_node();
  void begin(int body, cudaStream_t inner);
  static void end(cudaStream_t inner);
  static void abandon(cudaStream_t inner) noexcept;
  void follow();

  cudaStream_t stream_;
  int bodies_ = 1;
  uint64_t handle_ = 0;
  cudaGraphNode_t node_ = nullptr;       // the condition's, once it is there
  const cudaGraph_t* graphs_ = nullptr;  // of the node, one for each body
};

}  // namespace pariskv::cuda
