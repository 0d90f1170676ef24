/** The host's own CPU backend, for what is ours by claim and not by need. */
#pragma once

#include <vector>

#include "host.h"

namespace pariskv::ggml {

class HostCpu {
 public:
  /** Throws std::runtime_error where the host has none. */
  HostCpu();
  ~HostCpu();
  HostCpu(const HostCpu&) = delete;
  HostCpu& operator=(const HostCpu&) = delete;

  void set_threads(int threads) { threads_ = threads; }
  ggml_status compute(const std::vector<ggml_tensor*>& nodes);

  /** Whether the host's CPU can do it: what is asked before a claim. */
  static bool supports(const ggml_tensor* op);

 private:
  ggml_backend_t backend_ = nullptr;
  ggml_backend_set_n_threads_t set_threads_ = nullptr;
  ggml_context* context_ = nullptr;
  int threads_ = 1;
};

}  // namespace pariskv::ggml
