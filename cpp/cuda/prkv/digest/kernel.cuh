/** digest_pages: a block for each page and kv head of the spans that enter zones. */
#pragma once

#include "prkv/digest/page.cuh"
#include "prkv/params.h"

namespace pariskv::cuda {

/** Blocks that an SM has room for at least: as many keys on their way as registers allow. */
template <typename Element, int kPage>
constexpr int kDigestBlocks = int(sizeof(Element)) * kPage <= 64 ? 4 : 2;

template <typename Element, int kPage>
__global__ void __launch_bounds__(kMostDigestThreads, kDigestBlocks<Element, kPage>)
    digest_pages(const __grid_constant__ DigestParams params) {
  __shared__ PageSpace space;
  const DigestCall& call = params.call;
  const DigestSpan& span = call.spans[blockIdx.z];
  const int page = int(span.begin) / kPage + int(blockIdx.x), begin = page * kPage;
  if (begin >= int(span.end)) return;
  const int head = int(blockIdx.y);
  const int segment = int(params.by_segment(begin)), tokens = int(call.shape.segment_tokens);
  const int slot = begin - segment * tokens;
  // Where the sink ends within the page, the page begins there.
  uint64_t live = ~uint64_t{0} >> (64 - kPage);
  if (int(span.begin) > begin) live = live >> (span.begin - begin) << (span.begin - begin);
  const int row_bytes = int(call.shape.rows.bytes());
  const char* keys = device::row_of_segment(static_cast<const char*>(span.sequence->rows[segment]),
                                            head, tokens, slot, row_bytes);
  char* block = reinterpret_cast<char*>(span.sequence->summaries[segment]);
  DigestPage<Element, kPage>{keys, row_bytes,      int(call.shape.rows.key_dim),
                             live, call.rules.box, space}
      .run(device::page_numbers(pages_of(call.shape, kPage), block, head, slot / kPage));
}

}  // namespace pariskv::cuda
