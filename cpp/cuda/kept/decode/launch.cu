// A decode step over kept rows as two kernels: attend_kept, merge_kept. The second may start while
// the first is at work.
#include "elements.h"
#include "kept/decode/attend/kernel.cuh"
#include "kept/decode/merge/kernel.cuh"
#include "kernel_limits.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

/** The kernels for one dtype and width, and the limits of the first one. */
struct KeptKernels {
  Kernel<KeptStepParams> attend;
  Kernel<KeptStepParams> merge;
  int threads, bytes;
  int rows;   // of the model: their bytes come on top
  int parts;  // of a head, at most
};

KeptKernels kernels_of(const ModelShape& shape) {
  return dispatch_element(shape.dtype, [&](auto element) {
    using Element = decltype(element);
    return dispatch_words(shape.rows.key_dim, [](auto words) {
      constexpr int kWords = int(decltype(words)::kValue);
      return KeptKernels{attend_kept<Element, kWords>,
                         merge_kept<Element>,
                         kKeptThreads<Element>,
                         kKeptBytes<Element, kWords>,
                         kKeptDirect<Element> ? 2 : 0,
                         kKeptDirect<Element> ? kMostParts : kSegments * device::kParts};
    });
  });
}

Limits measure(const KeptKernels& kernels, int device) {
  constexpr int kMostRowBytes = 2 * int(kMaxHeadDim) * 2;
  allow_shared_bytes(kernels.attend.address, kernels.bytes + kernels.rows * kMostRowBytes);
  share_carveout({kernels.attend.address, kernels.merge.address});
  return Limits::of(kernels.merge.address, device);
}

Limits limits_of(const KeptKernels& kernels) {
  return measured_once(kernels.attend.address,
                       [&](int device) { return measure(kernels, device); });
}

/** Blocks for each head: one for each part, if all of them run at once. */
int blocks_per_head(const Limits& limits, int parts, int64_t heads) {
  const int64_t room = int64_t(limits.multiprocessors) * limits.tuning->kept_per_sm;
  const int fewest = parts / 4;
  int blocks = parts;
  while (blocks > fewest && heads * blocks > room) blocks /= 2;
  return blocks;
}

}  // namespace

int64_t kept_decode_bytes(const ModelShape& shape) {
  const int64_t floats = kMostParts * shape.group * (2 + shape.rows.value_dim);
  return (floats * 4 + 255) / 256 * 256;
}

KeptStepParams launch_kept_attention(const KeptDecodeCall& call, cudaStream_t stream) {
  const KeptKernels kernels = kernels_of(call.shape);
  const int64_t heads = call.batch * call.shape.kv_heads;
  const int blocks = blocks_per_head(limits_of(kernels), kernels.parts, heads);
  const int bytes = kernels.bytes + kernels.rows * int(call.shape.rows.bytes());
  const KeptStepParams params{call,
                              device::SegmentDivisor::of(call.shape.segment_tokens),
                              device::IndexDivisor::of(call.shape.kv_heads),
                              device::IndexDivisor::of(heads),
                              device::IndexDivisor::of(call.shape.group),
                              blocks,
                              most_steps(call.logits.softcap)};
  Launch(heads * blocks, (bytes + 127) / 128 * 128, stream, kernels.threads)
      .run(kernels.attend, params, "decode: attend_kept");
  return params;
}

void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream) {
  const ModelShape& shape = call.shape;
  if (call.batch == 0) return;
  const KeptStepParams params = launch_kept_attention(call, stream);
  const KeptKernels kernels = kernels_of(shape);
  Launch(call.batch * shape.query_heads(), 0, stream, int((shape.rows.value_dim + 31) / 32 * 32))
      .early(limits_of(kernels).early)
      .run(kernels.merge, params, "decode: merge_kept");
}

}  // namespace pariskv::cuda
