// A decode step over pages as four kernels: attend_kept, score_pages, attend_pages, merge_pages.
// Each but the first may start while the one before it is at work.
#include <algorithm>

#include "clusters.h"
#include "device/partition.cuh"
#include "elements.h"
#include "ops.h"
#include "prkv/decode/kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

extern template PageKernels page_kernels<float>(int64_t);
extern template PageKernels page_kernels<__half>(int64_t);
extern template PageKernels page_kernels<__nv_bfloat16>(int64_t);

namespace {

constexpr int kStagedQueries = 16;  // of score_pages

/** The limits of a device for the kernels of one instance. */
struct Fit : Limits {
  int attend_bytes = 0;  // shared memory of a block that attends
  Clusters clusters;     // of blocks that attend
};

Fit measure(const PageKernels& kernels, int device) {
  const void* const attend = kernels.attend.address;
  Fit fit{Limits::of(attend, device), 0, {}};
  fit.attend_bytes =
      std::min(std::max(fit.tuning->attend_bytes, kernels.attend_least), fit.shared_bytes);
  allow_shared_bytes(attend, fit.attend_bytes);
  share_carveout({kernels.score.address, attend, kernels.merge.address});
  if (fit.early) fit.clusters = Clusters::of(attend, fit.attend_bytes);
  return fit;
}

Fit fit_of(const PageKernels& kernels) {
  return measured_once(kernels.attend.address,
                       [&](int device) { return measure(kernels, device); });
}

PageKernels kernels_of(const ModelShape& shape) {
  return dispatch_element(shape.dtype, [&](auto element) {
    return page_kernels<decltype(element)>(shape.rows.key_dim);
  });
}

int score_bytes(const ModelShape& shape) {
  const int64_t staged = std::min<int64_t>((shape.group + 3) / 4 * 4, kStagedQueries);
  return int(staged * shape.rows.key_dim * 4);
}

}  // namespace

PageScratchLayout PageScratchLayout::of(const ModelShape& shape, const PRKVRules& rules) {
  const auto whole = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t parts = device::kParts * shape.group * (2 + shape.rows.value_dim);
  PageScratchLayout layout{};
  layout.fetched = whole(kept_decode_bytes(shape));
  layout.search = layout.fetched + whole(4 * parts);
  layout.scores = layout.search + whole(int64_t(sizeof(PageSearch)));
  layout.page = rules.page;
  layout.most_pages = rules.most_pages();
  return layout;
}

void launch_page_decode(const PageDecodeCall& call, cudaStream_t stream) {
  const ModelShape& shape = call.shape;
  const int64_t heads = call.batch * shape.kv_heads;
  if (heads == 0) return;
  const PageKernels kernels = kernels_of(shape);
  const Fit fit = fit_of(kernels);
  KeptStepParams kept{};
  if (!call.explains) kept = launch_kept_attention(call, stream);
  const PageStepParams common{call, PageScratchLayout::of(shape, call.rules),
                              device::SegmentDivisor::of(shape.segment_tokens),
                              device::IndexDivisor::of(shape.kv_heads)};
  const int score_blocks = int(std::clamp<int64_t>(
      fit.multiprocessors * fit.tuning->pages_per_sm / heads, 1, kMostPageBlocks));
  Launch(heads * score_blocks, score_bytes(shape), stream, device::kThreads)
      .early(fit.early && !call.explains)
      .run(kernels.score,
           PageScoreParams{common, score_blocks, device::IndexDivisor::of(score_blocks)},
           "decode: score_pages");
  const int size = fit.clusters.size_for(heads, fit, true);
  Launch(heads * size, fit.attend_bytes, stream, device::kThreads)
      .clusters_of(size)
      .early(fit.early)
      .run(kernels.attend, PageAttendParams{common, size, fit.attend_bytes, score_blocks},
           "decode: attend_pages");
  if (call.explains) return;
  Launch(call.batch * shape.query_heads(), 0, stream, int((shape.rows.value_dim + 31) / 32 * 32))
      .early(fit.early)
      .run(kernels.merge, PageMergeParams{kept, common.scratch}, "decode: merge_pages");
}

}  // namespace pariskv::cuda
