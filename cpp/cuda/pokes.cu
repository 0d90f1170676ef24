// Words that the host writes into tables in device memory, in stream order.
#include <algorithm>

#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

// As many as fit the 4 KB of arguments that every launch may carry.
constexpr int kPokes = 250;

struct Pokes {
  Poke poke[kPokes];
  int32_t count;
};
static_assert(sizeof(Pokes) <= 4096);

__global__ void write_pokes(const __grid_constant__ Pokes pokes) {
  const int i = int(threadIdx.x);
  if (i < pokes.count) *pokes.poke[i].target = pokes.poke[i].value;
}

}  // namespace

// The words are copied when the launch is made, so the caller's memory is free at once and a
// captured launch keeps its own. Launches follow one another; within one, no order is promised:
// the targets of a call must be distinct.
void launch_pokes(const Poke* pokes, int64_t count, cudaStream_t stream) {
  Pokes some;
  for (int64_t first = 0; first < count; first += kPokes) {
    some.count = int32_t(std::min<int64_t>(kPokes, count - first));
    std::copy_n(pokes + first, some.count, some.poke);
    write_pokes<<<1, kPokes, 0, stream>>>(some);
    check_launch("pokes");
  }
}

}  // namespace pariskv::cuda
