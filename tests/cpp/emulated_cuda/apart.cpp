// Decodes as the library asks for them, in one go, or step by step.
#include "apart.h"

#include "conditional.h"
#include "kernels.h"

namespace emulator {

bool steps_apart = false;

}  // namespace emulator

namespace pariskv::cuda {

// Graphs without conditions: their work is recorded as ever.
Conditional::Conditional(cudaStream_t stream, int) : stream_(stream) {}
void Conditional::add_node() {}
void Conditional::begin(int, cudaStream_t) {}
void Conditional::end(cudaStream_t) {}
void Conditional::abandon(cudaStream_t) noexcept {}
void Conditional::follow() {}

/** What pariskv/decode/launch.cu defines. */
void launch_steps(const DecodeCall& call, cudaStream_t stream);

void launch_decode(const DecodeCall& call, cudaStream_t stream) {
  if (!emulator::steps_apart) return launch_steps(call, stream);
  for (int step = call.first_step; step <= call.last_step; ++step) {
    DecodeCall one = call;
    one.first_step = one.last_step = step;
    launch_steps(one, stream);
  }
}

}  // namespace pariskv::cuda
