// Digests of pages that enter zones.
#include <algorithm>

#include "elements.h"
#include "launch.h"
#include "prkv/digest/kernel.cuh"
#include "runtime.h"

namespace pariskv::cuda {

void launch_digest(const DigestCall& call, cudaStream_t stream) {
  int64_t pages = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    const DigestSpan& span = call.spans[i];
    const int64_t page = call.rules.page;
    pages = std::max(pages, (span.end + page - 1) / page - span.begin / page);
  }
  if (pages == 0) return;
  const DigestParams params{call, device::SegmentDivisor::of(call.shape.segment_tokens)};
  const dim3 grid(unsigned(pages), unsigned(call.shape.kv_heads), unsigned(call.count));
  const int threads = digest_threads(int(call.shape.rows.key_dim));
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    dispatch(Sizes<8, 16, 32, 64>{}, call.rules.page, [&](auto page) {
      Launch(grid, 0, stream, threads)
          .run(Kernel<DigestParams>(digest_pages<Element, int(decltype(page)::kValue)>), params,
               "digest: digest_pages");
    });
  });
}

}  // namespace pariskv::cuda
