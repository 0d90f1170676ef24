// What tokens and sequences take at most, before there is a cache.
#include <algorithm>
#include <numeric>

#include "backend/backend.h"
#include "check.h"
#include "pariskv/config.h"
#include "sequence.h"

namespace pariskv {

namespace {

int64_t whole(int64_t size, int64_t grain) { return (size + grain - 1) / grain; }

/**
 * The memory blocks of one layer of one sequence. What a search needs is the same on every device,
 * so the CPU's is asked: a GPU need not be there.
 */
class Footprint {
 public:
  Footprint(const Config& config, int64_t most_tokens)
      : config_(config),
        on_gpu_(config.device.type == DeviceType::kCuda),
        alignment_(on_gpu_ ? kDeviceAlignment : ArenaTraits{}.alignment),
        backend_(make_backend(on_cpu(config), {})),
        search_(backend_->make_search(config, shape_of(config))),
        shape_(on_gpu_ ? with_row_cache(search_->shape(), config, search_->needs().rows_per_head)
                       : search_->shape()),
        sizes_{config.sink, config.local, config.update, search_->needs().grain,
               search_->needs().opening},
        most_(most_tokens),
        longest_(Regions{}.prefilled(most_tokens, sizes_)) {}

  /** What comes in whole pieces: of so many tokens each. */
  struct Pieces {
    int64_t tokens;
    Bytes bytes;
  };
  /** Blocks of rows. */
  Pieces rows() const {
    const int64_t plain = taken(shape_.row_block_bytes());
    if (!has_zone()) return {shape_.layout.tokens, {plain, 0}};
    const int64_t bytes = shape_.narrows() ? taken(shape_.narrow_block_bytes()) : plain;
    return {shape_.layout.tokens, leaves() ? Bytes{0, bytes} : Bytes{bytes, 0}};
  }
  /** Summaries of segments. */
  Pieces summaries() const {
    const int64_t bytes = has_zone() ? taken(search_->needs().summary_bytes) : 0;
    return {config_.segment_tokens, {bytes, 0}};
  }

  /** Of a layer, besides whole pieces. A call makes what changes beside what is there. */
  int64_t layer() const {
    const SequenceView view = view_of(longest_, sizes_, *search_, StepFacts{});
    int64_t bytes = 2 * tables();
    for (Part part : kAllParts) {
      if (!has(part, view)) continue;
      const bool stays = rules_of(part).on_write == OnWrite::kInPlace;
      bytes += (stays ? 1 : 2) * taken(part_size(part, shape_, *search_, view).bytes);
    }
    if (!has_zone() || (!shape_.narrows() && !leaves())) return bytes;
    bytes += plain_blocks() * taken(shape_.row_block_bytes());
    if (shape_.narrows() && leaves()) bytes += 2 * taken(shape_.narrow_block_bytes());
    return bytes;
  }

  /** Of a sequence, besides its layers. */
  int64_t sequence() const {
    return on_gpu_ ? 2 * taken(config_.layers * int64_t(sizeof(SequenceView))) : 0;
  }

 private:
  static Config on_cpu(Config config) {
    config.device = {};
    config.threads = 1;
    config.memory_budget = 0;
    return config;
  }

  /** As the arena takes it. */
  int64_t taken(int64_t bytes) const { return whole(bytes, alignment_) * alignment_; }

  bool has_zone() const { return longest_.zone_tokens(sizes_) > 0; }
  /** Rows of the zone have a place in host memory. Where they leave for want of room they stay. */
  bool leaves() const { return on_gpu_ && config_.placement == Placement::kHost; }

  bool has(Part part, const SequenceView& view) const {
    switch (part) {
      case Part::kState:
        return has_zone() || search_->needs().observed.before(most_) > 0;
      case Part::kRowCache:
        return !view.dense() && leaves();
      case Part::kTailCopies:
        return !view.dense();
      default:
        return true;
    }
  }

  /** Tables of segments: on a GPU. */
  int64_t tables() const {
    if (!on_gpu_) return 0;
    return taken(DeviceTables::bytes_of(whole(most_, config_.segment_tokens), shape_.narrows()));
  }

  /** Of rows that are not in the zone: until it opens all of them, then the sink and the window. */
  int64_t plain_blocks() const {
    const int64_t tokens = shape_.layout.tokens;
    const int64_t window = sizes_.local + sizes_.update + sizes_.grain;
    const int64_t before = std::max(sizes_.opening, sizes_.sink + sizes_.grain) + window;
    const int64_t after = whole(sizes_.sink, tokens) + whole(window, tokens) + 1;
    return std::min(whole(most_, tokens), std::max(whole(before, tokens), after));
  }

  const Config& config_;
  const bool on_gpu_;
  const int64_t alignment_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<Search> search_;
  const ModelShape shape_;
  const RegionSizes sizes_;
  const int64_t most_;
  const Regions longest_;
};

void check(const char* verb, const char* argument, int64_t tokens) {
  if (tokens >= 1 && tokens <= kMostTokens) return;
  fail("[", verb, "] ", argument, ": expected 1 to ", kMostTokens, " tokens, got ", tokens);
}

}  // namespace

Bytes Config::bytes_per_token(int64_t most_tokens) const {
  check("bytes_per_token", "most_tokens", most_tokens);
  validate();
  const Config own = resolved();
  const Footprint footprint(own, most_tokens);
  Bytes found{};
  for (const Footprint::Pieces& each : {footprint.rows(), footprint.summaries()}) {
    found.device += whole(layers * each.bytes.device, each.tokens);
    found.host += whole(layers * each.bytes.host, each.tokens);
  }
  return found;
}

Bytes Config::bytes_per_sequence(int64_t most_tokens, int64_t multiple) const {
  check("bytes_per_sequence", "most_tokens", most_tokens);
  check("bytes_per_sequence", "multiple", multiple);
  validate();
  const Config own = resolved();
  const Footprint footprint(own, most_tokens);
  int64_t rounding = 0;
  for (const Footprint::Pieces& each : {footprint.rows(), footprint.summaries()}) {
    // Both what is counted and what is stored are multiples of the common divisor.
    const int64_t uncounted = each.tokens - std::gcd(each.tokens, multiple);
    rounding += whole(layers * each.bytes.device * uncounted, each.tokens);
  }
  return {rounding + layers * footprint.layer() + footprint.sequence(), 0};
}

}  // namespace pariskv
