// Which GPUs there is code for in this build.
#include <algorithm>

#include "kernels.h"

namespace pariskv::cuda {

namespace {

// Of the compiler: 900 for compute capability 9.0. The driver compiles the PTX of the last one for
// newer devices.
#ifdef __CUDA_ARCH_LIST__
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
#ifdef PARISKV_PTX
constexpr bool kPtx = true;
#else
constexpr bool kPtx = false;
#endif
#else
constexpr int kArchitectures[] = {800};  // the emulator of the tests
constexpr bool kPtx = true;
#endif

}  // namespace

bool has_code_for(int major, int minor) {
  const int capability = 100 * major + 10 * minor;
  int last = 0;
  for (const int architecture : kArchitectures) {
    if (architecture <= capability && architecture / 100 == major) return true;
    last = std::max(last, architecture);
  }
  return kPtx && last <= capability;
}

std::string code_text() {
  std::string text;
  for (const int architecture : kArchitectures) {
    text += (text.empty() ? "" : ", ") + std::to_string(architecture / 100) + "." +
            std::to_string(architecture / 10 % 10);
  }
  return text + (kPtx ? " and newer" : "");
}

}  // namespace pariskv::cuda
