// A decode step over kept rows as two kernels: attend_kept, merge_kept. The second may start while
// the first is at work.
#include "clusters.h"
#include "elements.h"
#include "hardkv/decode/instance.cuh"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

/** The kernels for one dtype and width, and what the first one needs. */
struct KeptKernels {
  Kernel<KeptStepParams> attend;
  Kernel<KeptStepParams> merge;
  int threads, bytes;
  bool row;  // bytes go without the room of a row
};

KeptKernels kernels_of(const ModelShape& shape) {
  return dispatch_element(shape.rows.dtype, [&](auto element) {
    using Element = decltype(element);
    return dispatch_words(shape.rows.key_dim, [](auto words) {
      constexpr int kWords = int(decltype(words)::kValue);
      return KeptKernels{attend_kept<Element, kWords>, merge_kept<Element>, kKeptThreads<Element>,
                         kKeptBytes<Element, kWords>, kKeptDirect<Element>};
    });
  });
}

/** What a device can do with the kernels of one instance. */
struct KeptFit {
  int multiprocessors = 0;
  bool early = false;  // a kernel can be launched before its predecessor is done
};

KeptFit measure(const KeptKernels& kernels, int index) {
  KeptFit fit;
  check(cudaDeviceGetAttribute(&fit.multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "ask for a device's limits");
  constexpr int kMostRowBytes = 2 * int(kMaxHeadDim) * 4;
  check(cudaFuncSetAttribute(kernels.attend.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernels.bytes + (kernels.row ? kMostRowBytes : 0)),
        "give the decode kernels their shared memory");
  // Blocks of one meet blocks of the next: both must want the memory cut alike.
  for (const void* kernel : {kernels.attend.address, kernels.merge.address}) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "give the decode kernels their shared memory");
  }
  fit.early = starts_early(kernels.merge.address);
  return fit;
}

KeptFit fit_of(const KeptKernels& kernels) {
  return measured_once(kernels.attend.address,
                       [&](int device) { return measure(kernels, device); });
}

constexpr int kFewestBlocks = 4;

/** Blocks for each segment of a head: one for each part, if all of them run at once. */
int blocks_per_segment(const KeptFit& fit, int64_t heads) {
  constexpr int kBlocksPerSm = 5;
  int blocks = device::kParts;
  while (blocks > kFewestBlocks &&
         heads * kSegments * blocks > int64_t(fit.multiprocessors) * kBlocksPerSm) {
    blocks /= 2;
  }
  return blocks;
}

}  // namespace

int64_t kept_decode_bytes(const ModelShape& shape) {
  const int64_t floats = kSegments * device::kParts * shape.group * (2 + shape.rows.value_dim);
  return (floats * 4 + 255) / 256 * 256;
}

KeptStepParams launch_kept_attention(const KeptDecodeCall& call, cudaStream_t stream) {
  const KeptKernels kernels = kernels_of(call.shape);
  const int64_t heads = call.batch * call.shape.kv_heads;
  const int blocks = blocks_per_segment(fit_of(kernels), heads);
  const int bytes = kernels.bytes + (kernels.row ? int(call.shape.rows.bytes()) : 0);
  const KeptStepParams params{call,
                              device::SegmentDivisor::of(call.shape.segment_tokens),
                              device::IndexDivisor::of(call.shape.kv_heads),
                              device::IndexDivisor::of(heads),
                              device::IndexDivisor::of(call.shape.group),
                              blocks,
                              most_steps(call.logits.softcap)};
  Launch(heads * kSegments * blocks, (bytes + 127) / 128 * 128, stream, kernels.threads)
      .run(kernels.attend, params, "decode: attend_kept");
  return params;
}

void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream) {
  const ModelShape& shape = call.shape;
  if (call.batch == 0) return;
  const KeptStepParams params = launch_kept_attention(call, stream);
  const KeptKernels kernels = kernels_of(shape);
  Launch(call.batch * shape.query_heads(), 0, stream, int((shape.rows.value_dim + 31) / 32 * 32))
      .early(fit_of(kernels).early)
      .run(kernels.merge, params, "decode: merge_kept");
}

}  // namespace pariskv::cuda
