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

/** Whether this driver has choices of several bodies. */
bool can_switch() {
#if CUDART_VERSION >= 12080
  int version = 0;
  return succeeded(cudaDriverGetVersion(&version)) && version >= 12080;
#else
  return false;
#endif
}

}  // namespace

Conditional::Conditional(cudaStream_t stream, int bodies)
    : stream_(stream), bodies_(can_switch() ? bodies : 1) {
  Position now{};
  cudaGraphConditionalHandle handle = 0;
  // What no kernel has set: of one body false, of several the number of none.
  const unsigned unset = bodies_ == 1 ? 0 : unsigned(bodies_);
  if (succeeded(ask(stream_, now)) && succeeded(cudaGraphConditionalHandleCreate(
                                          &handle, now.graph, unset, cudaGraphCondAssignDefault))) {
    handle_ = handle;
  }
}

void Conditional::add_node() {
  Position now{};
  check(ask(stream_, now), kWhat);
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle_;
  params.conditional.type = cudaGraphCondTypeIf;
#if CUDART_VERSION >= 12080
  if (bodies_ > 1) params.conditional.type = cudaGraphCondTypeSwitch;
#endif
  params.conditional.size = unsigned(bodies_);
#if CUDART_VERSION >= 13000
  check(cudaGraphAddNode(&node_, now.graph, now.nodes, now.edges, now.count, &params), kWhat);
#else
  check(cudaGraphAddNode_v2(&node_, now.graph, now.nodes, now.edges, now.count, &params), kWhat);
#endif
  graphs_ = params.conditional.phGraph_out;
}

void Conditional::begin(int body, cudaStream_t inner) {
  check(cudaStreamBeginCaptureToGraph(inner, graphs_[body], nullptr, nullptr, 0,
                                      cudaStreamCaptureModeRelaxed),
        kWhat);
}

void Conditional::end(cudaStream_t inner) {
  cudaGraph_t recorded{};
  check(cudaStreamEndCapture(inner, &recorded), kWhat);
}

void Conditional::follow() {
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

Conditional::Conditional(cudaStream_t stream, int) : stream_(stream) {}
void Conditional::add_node() {}
void Conditional::begin(int, cudaStream_t) {}
void Conditional::end(cudaStream_t) {}
void Conditional::abandon(cudaStream_t) noexcept {}
void Conditional::follow() {}

#endif

}  // namespace pariskv::cuda
