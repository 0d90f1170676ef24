/** All there is of CUDA in a build without it. */
#include "backend/backend.h"
#include "check.h"

namespace pariskv::cuda {

bool is_built() { return false; }

bool is_available() { return false; }

std::unique_ptr<Backend> make_backend(const Config& config, const Resources&) {
  fail("[config] device: expected cpu, got cuda:", config.device.index,
       "; this build has no CUDA backend (install the CUDA toolkit, nvcc 12.8 or newer, and "
       "build pariskv_core again)");
}

}  // namespace pariskv::cuda
