#include "host_cpu.h"

#include <stdexcept>

namespace pariskv::ggml {

namespace {

/** Nodes of a graph that is given to the host's CPU at once: those of a layer are a handful. */
constexpr size_t kMostNodes = 64;

ggml_backend_dev_t device() {
  return host().ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

}  // namespace

HostCpu::HostCpu() {
  if (device() == nullptr) throw std::runtime_error("the host has no CPU backend");
  backend_ = host().ggml_backend_dev_init(device(), nullptr);
  const size_t bytes = host().ggml_graph_overhead_custom(kMostNodes, false) + 1024;
  context_ = host().ggml_init({bytes, nullptr, true});
  if (backend_ == nullptr || context_ == nullptr) {
    throw std::runtime_error("the host's CPU backend did not start");
  }
  set_threads_ =
      reinterpret_cast<ggml_backend_set_n_threads_t>(host().ggml_backend_reg_get_proc_address(
          host().ggml_backend_dev_backend_reg(device()), "ggml_backend_set_n_threads"));
}

HostCpu::~HostCpu() {
  if (context_ != nullptr) host().ggml_free(context_);
  if (backend_ != nullptr) host().ggml_backend_free(backend_);
}

ggml_status HostCpu::compute(const std::vector<ggml_tensor*>& nodes) {
  if (set_threads_ != nullptr) set_threads_(backend_, threads_);
  for (size_t begin = 0; begin < nodes.size(); begin += kMostNodes) {
    host().ggml_reset(context_);
    ggml_cgraph* graph = host().ggml_new_graph_custom(context_, kMostNodes, false);
    for (size_t i = begin; i < nodes.size() && i < begin + kMostNodes; ++i) {
      host().ggml_graph_add_node(graph, nodes[i]);
    }
    const ggml_status status = host().ggml_backend_graph_compute(backend_, graph);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
}

bool HostCpu::supports(const ggml_tensor* op) {
  return device() != nullptr && host().ggml_backend_dev_supports_op(device(), op);
}

}  // namespace pariskv::ggml
