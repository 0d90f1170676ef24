// A decode step over kept rows as two kernels: attend_kept, merge_kept. The second may start while
// the first is at work.
#include <map>
#include <mutex>
#include <utility>

#include "elements.h"
#include "hardkv/decode/instance.cuh"
#include "launch.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

/** The kernels for one dtype and width, and what the first one needs. */
struct KeptKernels {
  Kernel<KeptStepParams> attend, merge;
  int threads, bytes;
  bool row;  // bytes go without the room of a row
};

KeptKernels kernels_of(const ModelShape& shape) {
  return dispatch_element(shape.rows.dtype, [&](auto element) {
    using Element = decltype(element);
    return dispatch(RotatedDims{}, shape.rotated_dim, [](auto dim) {
      constexpr int kWords = int(decltype(dim)::kValue / 32);
      return KeptKernels{attend_kept<Element, kWords>, merge_kept<Element>, kKeptThreads<Element>,
                         kKeptBytes<Element, kWords>, kKeptDirect<Element>};
    });
  });
}

/** Prepares a kernel; whether the one after it can be launched before it is done. */
bool prepare(const KeptKernels& kernels) {
  constexpr int kMostRowBytes = 2 * int(kMaxHeadDim) * 4;
  const void* const attend = kernels.attend.address;
  check(cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernels.bytes + (kernels.row ? kMostRowBytes : 0)),
        "give the decode kernels their shared memory");
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "ask for the device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "ask for a device's limits");
  // Code for older devices runs on newer ones too, and does not wait.
  cudaFuncAttributes code{};
  check(cudaFuncGetAttributes(&code, attend), "ask for a kernel's code");
  return major >= 9 && code.ptxVersion >= 90;
}

/** Once for each instance and device. */
bool starts_early(const KeptKernels& kernels) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  int device = 0;
  check(cudaGetDevice(&device), "ask for the device");
  const std::pair<const void*, int> key{kernels.attend.address, device};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = prepare(kernels);
}

}  // namespace

int64_t kept_decode_bytes(const ModelShape& shape) {
  const int64_t floats = device::kParts * shape.group * (2 + shape.rows.value_dim);
  return (floats * 4 + 255) / 256 * 256;
}

void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream) {
  const ModelShape& shape = call.shape;
  const int64_t heads = call.batch * shape.kv_heads;
  if (heads == 0) return;
  const KeptKernels kernels = kernels_of(shape);
  const bool early = starts_early(kernels);
  const KeptStepParams params{call,
                              device::SegmentDivisor::of(shape.segment_tokens),
                              device::IndexDivisor::of(shape.kv_heads),
                              device::IndexDivisor::of(heads),
                              device::IndexDivisor::of(shape.query_heads()),
                              device::kParts,
                              most_steps(call.logits.softcap)};
  const int bytes = kernels.bytes + (kernels.row ? int(shape.rows.bytes()) : 0);
  Launch(heads * device::kParts, (bytes + 127) / 128 * 128, stream, kernels.threads)
      .run(kernels.attend, params, "decode: attend_kept");
  Launch(call.batch * shape.query_heads(), 0, stream, int((shape.rows.value_dim + 31) / 32 * 32))
      .early(early)
      .run(kernels.merge, params, "decode: merge_kept");
}

}  // namespace pariskv::cuda
