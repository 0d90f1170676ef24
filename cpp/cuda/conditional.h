/** Work of a recorded step that runs only where a kernel before it has said so. */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime.h"

namespace pariskv::cuda {

#if CUDART_VERSION >= 12040
#define PKV_CONDITIONAL 1
#endif

/**
 * A condition of the graph that a stream is being captured into, false unless a kernel sets it. A
 * driver that knows none leaves it without a handle, and the work is recorded as ever.
 */
class Conditional {
 public:
  explicit Conditional(cudaStream_t stream) : stream_(stream) {
#if PKV_CONDITIONAL
    Position now{};
    if (!succeeded(ask(now)) || !succeeded(cudaGraphConditionalHandleCreate(
                                    &handle_, now.graph, 0, cudaGraphCondAssignDefault))) {
      handle_ = 0;
    }
#endif
  }

  /** For device::set_condition; 0: there is none. */
  uint64_t handle() const { return handle_; }

  /** Records what `run(stream)` gives `inner`, a stream of the library's own; or the stream. */
  template <typename Run>
  void record(cudaStream_t inner, Run run) {
    if (handle_ == 0) return run(stream_);
#if PKV_CONDITIONAL
    Position now{};
    check(ask(now), kWhat);
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle_;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    cudaGraphNode_t node{};
    check(add_node(&node, now, &params), kWhat);
    const cudaGraph_t body = params.conditional.phGraph_out[0];
    check(cudaStreamBeginCaptureToGraph(inner, body, nullptr, nullptr, 0,
                                        cudaStreamCaptureModeRelaxed),
          kWhat);
    cudaGraph_t recorded{};
    try {
      run(inner);
    } catch (...) {
      succeeded(cudaStreamEndCapture(inner, &recorded));
      throw;
    }
    check(cudaStreamEndCapture(inner, &recorded), kWhat);
    check(follow(node), kWhat);
#endif
  }

 private:
#if PKV_CONDITIONAL
  static constexpr const char* kWhat = "record work that depends on a length";

  /** What the next node of the stream comes after. */
  struct Position {
    cudaGraph_t graph;
    const cudaGraphNode_t* nodes;
    const cudaGraphEdgeData* edges;
    size_t count;
  };

#if CUDART_VERSION >= 13000
  cudaError_t ask(Position& now) const {
    cudaStreamCaptureStatus status{};
    return cudaStreamGetCaptureInfo(stream_, &status, nullptr, &now.graph, &now.nodes, &now.edges,
                                    &now.count);
  }
  static cudaError_t add_node(cudaGraphNode_t* node, const Position& now,
                              cudaGraphNodeParams* params) {
    return cudaGraphAddNode(node, now.graph, now.nodes, now.edges, now.count, params);
  }
  cudaError_t follow(cudaGraphNode_t node) const {
    return cudaStreamUpdateCaptureDependencies(stream_, &node, nullptr, 1,
                                               cudaStreamSetCaptureDependencies);
  }
#else
  cudaError_t ask(Position& now) const {
    cudaStreamCaptureStatus status{};
    return cudaStreamGetCaptureInfo_v3(stream_, &status, nullptr, &now.graph, &now.nodes,
                                       &now.edges, &now.count);
  }
  static cudaError_t add_node(cudaGraphNode_t* node, const Position& now,
                              cudaGraphNodeParams* params) {
    return cudaGraphAddNode_v2(node, now.graph, now.nodes, now.edges, now.count, params);
  }
  cudaError_t follow(cudaGraphNode_t node) const {
    return cudaStreamUpdateCaptureDependencies_v2(stream_, &node, nullptr, 1,
                                                  cudaStreamSetCaptureDependencies);
  }
#endif
  cudaGraphConditionalHandle handle_ = 0;
#else
  static constexpr uint64_t handle_ = 0;
#endif
  cudaStream_t stream_;
};

}  // namespace pariskv::cuda
