// Memory that is taken ahead of the sequences that will need it.
#include <algorithm>

#include "cache_impl.h"
#include "ledger.h"

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
  const Ledger ledger(config, (tokens - 1) / sequences + 1);
  std::vector<Arena::Stock> own, of_host;
  for (const Ledger::Pieces& pieces : {ledger.rows(), ledger.summaries()}) {
    // The last block of each sequence is there as a whole.
    const int64_t blocks = config.layers * ((tokens - 1) / pieces.tokens + sequences);
    auto& stocks = pieces.place == Place::kHost ? of_host : own;
    if (pieces.bytes > 0) stocks.push_back({pieces.bytes, blocks});
  }
  if (ledger.rows_lie_apart() && ledger.resident_blocks() > 0) {
    own.push_back(
        {impl_->shape_.row_block_bytes(), config.layers * sequences * ledger.resident_blocks()});
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

void Cache::reserve_device(int64_t bytes) {
  const Impl::Lock lock(*impl_);
  if (bytes < 1) fail("[reserve_device] bytes: expected 1 or more, got ", bytes);
  const MemoryUse use = impl_->backend_->arena().use();
  if (use.budget > 0 && bytes > use.budget) {
    throw OutOfMemory("[reserve_device] asked for " + std::to_string(bytes) +
                      " bytes ahead, but the budget is " + std::to_string(use.budget) +
                      "; reserve less or raise the budget");
  }
  if (impl_->backend_->keep_ready(bytes)) return;
  fail("[reserve_device] expected a cache on a GPU, in memory of its own (no Resources::device)");
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
