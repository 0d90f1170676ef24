// Memory that is taken ahead of the sequences that will need it.
#include <algorithm>

#include "cache_impl.h"

namespace pariskv {

void Cache::reserve(int64_t tokens, int64_t sequences) {
  const Impl::Lock lock(*impl_);
  const Config& config = impl_->config_;
  constexpr int64_t kMostSequences = 1 << 16;
  if (sequences < 1 || sequences > kMostSequences) {
    fail("[reserve] sequences: expected 1 to ", kMostSequences, ", got ", sequences);
  }
  if (tokens < 1 || tokens > sequences * kMostTokens) {
    fail("[reserve] tokens: expected 1 to ", sequences * kMostTokens, ", as many as ", sequences,
         " sequences can have, got ", tokens);
  }
  const ModelShape& shape = impl_->shape_;
  const RegionSizes& sizes = impl_->sizes_;
  // The last block of each sequence is there as a whole.
  const auto of_tokens = [&](int64_t each) { return (tokens - 1) / each + sequences; };
  const int64_t longest = (tokens - 1) / sequences + 1;
  const int64_t rows = shape.row_block_bytes(), row_blocks = of_tokens(shape.layout.tokens);
  const int64_t blocks = config.layers * row_blocks;
  std::vector<Arena::Stock> own, of_host;
  if (Regions{}.prefilled(longest, sizes).zone_tokens(sizes) == 0) {
    own.push_back({rows, blocks});
  } else {
    const bool leaves = impl_->backend_->host_arena() != nullptr && !impl_->spills();
    const int64_t of_zone = shape.narrows() ? shape.narrow_block_bytes() : rows;
    (leaves ? of_host : own).push_back({of_zone, blocks});
    if (impl_->search_->needs().summary_bytes > 0) {
      own.push_back(
          {impl_->search_->needs().summary_bytes, config.layers * of_tokens(shape.segment_tokens)});
    }
    if (leaves || shape.narrows()) {
      // The sink and the window, which a block's end may part.
      const int64_t window = sizes.sink + sizes.local + sizes.update + sizes.grain;
      const int64_t plain = std::min(window / shape.layout.tokens + 2, row_blocks);
      own.push_back({rows, config.layers * sequences * plain});
    }
  }
  Arena& arena = impl_->backend_->arena();
  arena.check_reserve(own);
  if (!of_host.empty()) impl_->backend_->host_arena()->reserve(of_host);
  try {
    arena.reserve(own);
  } catch (const OutOfMemory&) {
    if (!of_host.empty()) impl_->backend_->host_arena()->trim();
    throw;
  }
}

void Cache::reserve_host(int64_t bytes, bool background) {
  const Impl::Lock lock(*impl_);
  Arena* const host = impl_->backend_->host_arena();
  if (host == nullptr) {
    fail(
        "[reserve_host] expected a cache with rows in host memory beside a device: on a GPU, with "
        "placement \"auto\" or \"host\"; reserve takes memory of the cache's own device");
  }
  if (bytes < 1) fail("[reserve_host] bytes: expected 1 or more, got ", bytes);
  const ModelShape& shape = impl_->shape_;
  const int64_t rows = shape.narrows() ? shape.narrow_block_bytes() : shape.row_block_bytes();
  const std::vector<Arena::Stock> stocks{{rows, std::max<int64_t>(bytes / rows, 1)}};
  background ? host->reserve_behind(stocks) : host->reserve(stocks);
}

}  // namespace pariskv
