#include "policy/prkv/policy.h"

#include <algorithm>
#include <bitset>
#include <cmath>

#include "observe.h"
#include "policy/prkv/pages.h"

namespace pariskv {

namespace {

PRKVRules rules_of(const PRKV& settings) {
  PRKVRules rules{};
  rules.budget = settings.budget;
  rules.page = settings.page;
  rules.static_pages = PRKVRules::kAuto;
  if (settings.static_share) {
    // A share such as .3 is a little more or less than that: 30 rows of 100 are meant.
    const double rows = double(settings.budget) * *settings.static_share + 1e-6;
    rules.static_pages = int64_t(rows) / settings.page;
  }
  rules.box = settings.digest == PageDigest::kMax;
  return rules;
}

/** Queries that are remembered: none where no row is kept. */
int64_t recent_queries(const PRKV& settings) {
  return settings.static_share && *settings.static_share == 0 ? 0 : PRKV::kRecentQueries;
}

Needs needs_of(const PRKVRules& rules, const Config& config, const ModelShape& shape) {
  Needs needs;
  needs.steps = {config.searched_from(), rules.rows_per_head() > 0, {}};
  needs.summary_bytes = rules.has_pages() ? pages_of(shape, rules.page).bytes() : 0;
  needs.grain = rules.page;
  needs.rows_per_head = rules.rows_per_head();
  needs.waits_for_kept = !rules.has_pages();
  needs.fits_a_file = false;  // kept rows and recent queries have no place there
  return needs;
}

}  // namespace

PRKVPolicy::PRKVPolicy(const PRKV& settings, const Config& config, const ModelShape& shape,
                       BackendMemory& memory)
    : Search(shape.remembering(recent_queries(settings)),
             needs_of(rules_of(settings), config, shape)),
      rules_(rules_of(settings)),
      memory_(memory) {
  static_assert(PRKV::kRecentQueries <= kMostObservers);
}

int64_t PRKVPolicy::kept_rows(int64_t zone_tokens) const {
  const int64_t most = rules_.most_kept();
  return most == 0 ? 0 : std::clamp(zone_tokens, int64_t{1}, most);
}

int64_t PRKVPolicy::bytes_beside_kept(int64_t capacity) const {
  const AmendedLayout amended = amended_of(shape_, capacity);
  return amended.begin + amended.bytes() - shape_.kept(capacity).bytes();
}

bool PRKVPolicy::plan(SequenceView& sequence) const {
  return sequence.zone_tokens() > rules_.budget;
}

void PRKVPolicy::enter(const std::vector<Span>& spans, Stream stream) {
  if (!rules_.has_pages()) return;
  std::vector<DigestJob> jobs;
  for (const Span& span : spans) jobs.push_back({span.sequence, span.begin, span.end});
  digest({shape_, rules_, int64_t(jobs.size()), jobs.data()}, stream);
}

int64_t PRKVPolicy::unusable_keys(const SequenceView& view) const {
  if (!rules_.has_pages() || view.zone_tokens() == 0) return 0;
  const PageLayout layout = pages_of(shape_, rules_.page);
  std::vector<uint64_t> live(static_cast<size_t>(layout.count()));
  const int64_t first = view.zone_begin / rules_.page, last = (view.zone_end - 1) / rules_.page;
  int64_t usable = 0;
  for (int64_t s = first / layout.pages; s <= last / layout.pages; ++s) {
    memory_.fetch(live.data(), view.summaries[s], layout.count() * int64_t(sizeof(uint64_t)));
    const int64_t begin = std::max(first - s * layout.pages, int64_t{0});
    const int64_t end = std::min(last - s * layout.pages, layout.pages - 1);
    for (int64_t head = 0; head < layout.heads; ++head) {
      for (int64_t p = begin; p <= end; ++p) {
        usable += int64_t(std::bitset<64>(live[size_t(head * layout.pages + p)]).count());
      }
    }
  }
  return layout.heads * view.zone_tokens() - usable;
}

}  // namespace pariskv
