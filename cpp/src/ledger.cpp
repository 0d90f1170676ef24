#include "ledger.h"

#include <algorithm>
#include <numeric>

namespace pariskv {

namespace {

int64_t whole(int64_t size, int64_t grain) { return (size + grain - 1) / grain; }

Config on_cpu(Config config) {
  config.device = {};
  config.threads = 1;
  config.memory_budget = 0;
  return config;
}

}  // namespace

Ledger::Ledger(const Config& config, int64_t longest)
    : config_(config),
      on_gpu_(config.device.type == DeviceType::kCuda),
      alignment_(on_gpu_ ? kDeviceAlignment : ArenaTraits{}.alignment),
      backend_(make_backend(on_cpu(config), {})),
      search_(backend_->make_search(config, shape_of(config))),
      shape_(on_gpu_ ? with_row_cache(search_->shape(), config, search_->needs().rows_per_head)
                     : search_->shape()),
      sizes_{config.sink, config.local, config.update, search_->needs().grain,
             search_->needs().opening},
      most_(longest),
      longest_(Regions{}.prefilled(longest, sizes_)) {}

int64_t Ledger::taken(int64_t bytes) const { return whole(bytes, alignment_) * alignment_; }

Ledger::Pieces Ledger::rows() const {
  const bool narrow = has_zone() && shape_.narrows();
  Place place = Place::kDevice;
  if (has_zone() && may_leave()) place = leaves() ? Place::kHost : Place::kEither;
  return {"rows", place, shape_.layout.tokens,
          narrow ? shape_.narrow_block_bytes() : shape_.row_block_bytes()};
}

Ledger::Pieces Ledger::summaries() const {
  return {"summaries", Place::kDevice, config_.segment_tokens,
          has_zone() ? search_->needs().summary_bytes : 0};
}

int64_t Ledger::resident_blocks() const {
  if (!has_zone() || (!may_leave() && !shape_.narrows())) return 0;
  const int64_t tokens = shape_.layout.tokens;
  return std::min(whole(most_, tokens), whole(sizes_.sink, tokens) + whole(window(), tokens) + 1);
}

int64_t Ledger::opening_blocks() const {
  const int64_t after = resident_blocks(), tokens = shape_.layout.tokens;
  if (after == 0) return 0;
  const int64_t before = std::max(sizes_.opening, sizes_.sink + sizes_.grain) + window();
  return std::max<int64_t>(std::min(whole(most_, tokens), whole(before, tokens)) - after, 0);
}

int64_t Ledger::undropped_bytes() const {
  // A zone drops whole segments: not those of the sink, nor the one that it begins or ends in.
  const int64_t left = config_.segment_tokens - 1 + window(), tokens = shape_.layout.tokens;
  const int64_t before = std::max<int64_t>(whole(sizes_.sink, config_.segment_tokens), 1);
  const int64_t blocks = whole(before * config_.segment_tokens, tokens) + whole(left, tokens);
  return blocks * taken(shape_.row_block_bytes());
}

int64_t Ledger::tables() const {
  if (!on_gpu_) return 0;
  const int64_t segments = whole(most_, config_.segment_tokens);
  return taken(DeviceTables::bytes_of(segments, shape_.narrows()));
}

bool Ledger::has(Part part, const SequenceView& view) const {
  switch (part) {
    case Part::kState:
      return has_zone() || search_->needs().observed.before(most_) > 0;
    case Part::kRowCache:
      return !view.dense() && may_leave();
    case Part::kTailCopies:
      return !view.dense();
    default:
      return true;
  }
}

Footprint Ledger::footprint(const Load& load) const {
  Footprint found;
  const auto add = [&](const char* name, Place place, int64_t bytes) {
    if (bytes > 0) found.entries.push_back({name, place, bytes});
  };
  const int64_t layers = config_.layers, of_layers = load.sequences * layers;
  const auto bytes_of = [&](const Pieces& pieces) {
    const int64_t each = layers * taken(pieces.bytes);
    if (!load.tokens) return load.sequences * each * whole(load.longest, pieces.tokens);
    // Both what is counted and what is stored are multiples of the common divisor. Rows go to host
    // memory in whole segments alone.
    const bool rounds = pieces.place != Place::kHost;
    const int64_t uncounted = pieces.tokens - std::gcd(pieces.tokens, load.multiple);
    const int64_t parted = *load.tokens % pieces.tokens;
    return *load.tokens / pieces.tokens * each + whole(parted * each, pieces.tokens) +
           (rounds ? load.sequences * whole(each * uncounted, pieces.tokens) : 0);
  };
  const Pieces of_rows = rows();
  const int64_t all = bytes_of(of_rows);
  const bool drops = has_zone() && search_->needs().drops_rows;
  const int64_t stay = drops ? std::min(all, of_layers * undropped_bytes()) : all;
  const int64_t plain = taken(shape_.row_block_bytes());
  add(of_rows.name, of_rows.place, stay);
  add("prompt rows", of_rows.place, all - stay);
  add("resident rows", Place::kDevice, of_layers * resident_blocks() * plain);
  add("opening rows", Place::kDevice, of_layers * opening_blocks() * plain);
  const Pieces of_summaries = summaries();
  add(of_summaries.name, of_summaries.place, bytes_of(of_summaries));

  // A changed block is made beside the present one, in all layers of a step at once.
  int64_t changes = tables();
  const SequenceView view = view_of(longest_, sizes_, *search_, StepFacts{});
  for (Part part : kAllParts) {
    if (!has(part, view)) continue;
    const int64_t bytes = taken(part_size(part, shape_, *search_, view).bytes);
    add(rules_of(part).name, Place::kDevice, of_layers * bytes);
    if (rules_of(part).on_write != OnWrite::kInPlace) changes += bytes;
  }
  if (has_zone() && shape_.narrows()) {
    // A cut brings rows of a window back beside the present one; others are about to leave.
    changes += (whole(sizes_.local + sizes_.grain, shape_.layout.tokens) + 1) * plain;
    if (may_leave()) changes += 2 * taken(shape_.narrow_block_bytes());
  }
  const int64_t views = on_gpu_ ? taken(layers * int64_t(sizeof(SequenceView))) : 0;
  add("tables", Place::kDevice, of_layers * tables() + load.sequences * views);
  add("changes", Place::kDevice, of_layers * changes + load.sequences * views);
  return found;
}

}  // namespace pariskv
