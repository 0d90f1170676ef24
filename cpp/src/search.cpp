#include "search.h"

#include "check.h"

namespace pariskv {

// Not called: the needs of such a search do not ask for it.
void Search::observe(const std::vector<QuerySpan>&, Stream) { PKV_ASSERT(false); }
void Search::copy_tail_rows(const TailCopyArgs&, Stream) { PKV_ASSERT(false); }
void Search::remember(const RememberArgs&, Stream) { PKV_ASSERT(false); }
void Search::choose(const std::vector<KeptChange>&, Stream) { PKV_ASSERT(false); }
void Search::reserve_choice(const std::vector<KeptChange>&) {}

int64_t Search::kept_rows(int64_t) const { return 0; }
int64_t Search::bytes_beside_kept(int64_t) const { return 0; }

Summaries Search::summaries(const SequenceView&) const { return {}; }
void Search::clear_outside(uint8_t*, int64_t, int64_t) const {}
int64_t Search::unusable_keys(const SequenceView&) const { return 0; }

}  // namespace pariskv
