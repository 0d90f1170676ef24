#include "conditional.h"

#include "runtime.h"

namespace pariskv::cuda {

#if CUDART_VERSION >= 12040

namespace {

constexpr const char* kWhat = "record work that depends on a length";

/** The nodes that the next node of a stream comes after. */
struct Position {
  cudaGraph_t graph;
  const cudaGraphNode_t* nodes;
  const cudaGraphEdgeData* edges;
  size_t count;
};

cudaError_t ask(cudaStream_t stream, Position& now) {
  cudaStreamCaptureStatus status{};
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, &status, nullptr, &now.graph, &now.nodes, &now.edges,
                                  &now.count);
#else
  return cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, &now.graph, &now.nodes, &now.edges,
                                     &now.count);
#endif
}

}  // namespace

Conditional::Conditional(cudaStream_t stream) : stream_(stream) {
  Position now{};
  cudaGraphConditionalHandle handle = 0;
  if (succeeded(ask(stream_, now)) && succeeded(cudaGraphConditionalHandleCreate(
                                          &handle, now.graph, 0, cudaGraphCondAssignDefault))) {
    handle_ = handle;
  }
}

void Conditional::begin(cudaStream_t inner) {
  Position now{};
  check(ask(stream_, now), kWhat);
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle_;
  params.conditional.type = cudaGraphCondTypeIf;
  params.conditional.size = 1;
#if CUDART_VERSION >= 13000
  check(cudaGraphAddNode(&node_, now.graph, now.nodes, now.edges, now.count, &params), kWhat);
#else
  check(cudaGraphAddNode_v2(&node_, now.graph, now.nodes, now.edges, now.count, &params), kWhat);
#endif
  check(cudaStreamBeginCaptureToGraph(inner, params.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                      cudaStreamCaptureModeRelaxed),
        kWhat);
}

void Conditional::end(cudaStream_t inner) {
  cudaGraph_t recorded{};
  check(cudaStreamEndCapture(inner, &recorded), kWhat);
#if CUDART_VERSION >= 13000
  check(cudaStreamUpdateCaptureDependencies(stream_, &node_, nullptr, 1,
                                            cudaStreamSetCaptureDependencies),
        kWhat);
#else
  check(cudaStreamUpdateCaptureDependencies_v2(stream_, &node_, nullptr, 1,
                                               cudaStreamSetCaptureDependencies),
        kWhat);
#endif
}

void Conditional::abandon(cudaStream_t inner) noexcept {
  cudaGraph_t recorded{};
  succeeded(cudaStreamEndCapture(inner, &recorded));
}

#else

Conditional::Conditional(cudaStream_t stream) : stream_(stream) {}
void Conditional::begin(cudaStream_t) {}
void Conditional::end(cudaStream_t) {}
void Conditional::abandon(cudaStream_t) noexcept {}

#endif

}  // namespace pariskv::cuda
