// Words that the host writes into tables in device memory, in stream order.
#include <algorithm>
#include <iterator>

#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

// As many as fit the 4 KB of arguments that every launch may carry.
constexpr int kUpdates = 250;

struct Updates {
  WordUpdate word[kUpdates];
  int32_t count;
};
static_assert(sizeof(Updates) <= 4096);

__global__ void write_updates(const __grid_constant__ Updates updates) {
  const int i = int(threadIdx.x);
  if (i < updates.count) *updates.word[i].target = updates.word[i].value;
}

/** The first views of some sequences. */
struct Sequences {
  SequenceView* views[2 * kUpdates];
  int32_t layers;
};
static_assert(sizeof(Sequences) <= 4096);

__global__ void count_token(const __grid_constant__ Sequences sequences) {
  SequenceView* views = sequences.views[blockIdx.x];
  for (int l = int(threadIdx.x); l < sequences.layers; l += int(blockDim.x)) ++views[l].total;
}

}  // namespace

void launch_add_token(SequenceView* const* views, int64_t count, int64_t layers,
                      cudaStream_t stream) {
  Sequences some;
  some.layers = int32_t(layers);
  constexpr int64_t kMost = std::size(decltype(some.views){});
  for (int64_t first = 0; first < count; first += kMost) {
    const int64_t own = std::min(kMost, count - first);
    std::copy_n(views + first, own, some.views);
    count_token<<<unsigned(own), 64, 0, stream>>>(some);
    check_launch("count a token");
  }
}

// The words are copied when the launch is made, so the caller's memory is free at once and a
// captured launch keeps its own. Launches follow one another; within one, no order is promised:
// the targets of a call must be distinct.
void launch_word_updates(const WordUpdate* updates, int64_t count, cudaStream_t stream) {
  Updates some;
  for (int64_t first = 0; first < count; first += kUpdates) {
    some.count = int32_t(std::min<int64_t>(kUpdates, count - first));
    std::copy_n(updates + first, some.count, some.word);
    write_updates<<<1, kUpdates, 0, stream>>>(some);
    check_launch("update words");
  }
}

}  // namespace pariskv::cuda
