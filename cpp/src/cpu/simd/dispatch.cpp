// Which table runs: the best this build and machine have, or less when asked. Compiled for the
// oldest machine there is.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/simd/kernels.h"
#include "pariskv/error.h"

#ifdef PKV_HAVE_X86_KERNELS
#include <cpuid.h>
#endif

namespace pariskv::cpu {

#ifdef PKV_HAVE_X86_KERNELS

// Defined in avx2.cpp and avx512.cpp; not to be touched before the machine is known to have them.
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

namespace {

// The compiler's own test also asks whether the system saves the wide registers.
bool has_avx2() {
  unsigned a, b, c = 0, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Kernels* avx2_kernels() { return has_avx2() ? &kAvx2Kernels : nullptr; }
const Kernels* avx512_kernels() { return has_avx512() ? &kAvx512Kernels : nullptr; }

#else

const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }

#endif

void no_kernel(const char* what, int64_t value) {
  throw InternalError("pariskv has no kernel for the " + std::string(what) + " " +
                      std::to_string(value));
}

namespace {

const Kernels& choose() {
  const char* level = std::getenv("PARISKV_CPU_LEVEL");
  const auto asked = [&](const char* name) {
    return level == nullptr || *level == '\0' || std::strcmp(level, name) == 0;
  };
  if (!asked("avx512") && !asked("avx2") && !asked("plain")) {
    throw std::invalid_argument("PARISKV_CPU_LEVEL: expected plain, avx2 or avx512, got " +
                                std::string(level));
  }
  const Kernels* avx512 = avx512_kernels();
  if (avx512 != nullptr && asked("avx512")) return *avx512;
  const Kernels* avx2 = avx2_kernels();
  if (avx2 != nullptr && (asked("avx2") || asked("avx512"))) return *avx2;
  return plain_kernels();
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels& kernels = choose();
  return kernels;
}

}  // namespace pariskv::cpu
