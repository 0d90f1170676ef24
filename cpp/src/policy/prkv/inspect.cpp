// The PRKV policy explains its work: the pages of a step, and the digests of a zone.
#include <algorithm>
#include <limits>

#include "policy/padded.h"
#include "policy/prkv/pages.h"
#include "policy/prkv/policy.h"

namespace pariskv {

void PRKVPolicy::explain(const DecodeArgs& args, Stream stream, Explanation& out) {
  const PRKVTrace own = trace(args, stream);
  PRKVExplanation details;
  details.kv_heads = out.kv_heads;
  details.static_rows = own.static_rows;
  details.first_page = out.zone_begin / rules_.page;
  padded(own.kept, int64_t{-1}, out.kept);
  if (!own.scores.empty()) {
    out.searched = true;
    const int64_t pages = padded(own.scores, 0.0f, details.page_scores);
    padded(own.pages, int64_t{-1}, details.pages);
    out.selected = padded(own.positions, int64_t{-1}, out.positions);
    for (size_t i = 0; i < out.positions.size(); ++i) {
      const int64_t head = int64_t(i) / out.selected, position = out.positions[i];
      const int64_t page = position / rules_.page - details.first_page;
      out.worth.push_back(position < 0 ? std::numeric_limits<float>::quiet_NaN()
                                       : details.page_scores[size_t(head * pages + page)]);
    }
  }
  out.details = std::move(details);
}

Summaries PRKVPolicy::summaries(const SequenceView& view) const {
  Summaries out;
  out.kv_heads = shape_.kv_heads;
  out.tokens = view.zone_tokens();
  out.zone_begin = view.zone_begin;
  out.channels = shape_.rows.key_dim;
  if (!rules_.has_pages() || out.tokens == 0) return out;
  const PageLayout layout = pages_of(shape_, rules_.page);
  const int64_t first = view.zone_begin / rules_.page, last = (view.zone_end - 1) / rules_.page;
  const int64_t first_segment = first / layout.pages;
  std::vector<std::vector<uint8_t>> segments;
  for (int64_t s = first_segment; s <= last / layout.pages; ++s) {
    segments.emplace_back(static_cast<size_t>(layout.bytes()));
    memory_.fetch(segments.back().data(), view.summaries[s], layout.bytes());
  }
  out.page = rules_.page;
  out.pages = last + 1 - first;
  for (int64_t head = 0; head < out.kv_heads; ++head) {
    for (int64_t p = first; p <= last; ++p) {
      uint8_t* segment = segments[size_t(p / layout.pages - first_segment)].data();
      const int64_t slot = p % layout.pages;
      const bool empty = *layout.live(segment, head, slot) == 0;
      const float unit = *layout.unit(segment, head, slot);
      const uint16_t* numbers = layout.digest(segment, head, slot);
      for (int64_t d = 0; d < 2 * out.channels; ++d) {
        const float number =
            empty ? std::numeric_limits<float>::quiet_NaN() : digest_number(numbers[d]) * unit;
        (d < out.channels ? out.middles : out.distances).push_back(number);
      }
    }
  }
  return out;
}

}  // namespace pariskv
