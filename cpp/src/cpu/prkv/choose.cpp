// PRKV's choice of the rows that are kept, and the pages that are left without them.
#include <algorithm>
#include <cstring>

#include "cpu/kept/choice.h"
#include "cpu/prkv/digest.h"
#include "cpu/prkv/search.h"
#include "policy/prkv/pages.h"

namespace pariskv::cpu {

namespace {

/**
 * The budget is split by agreement only where rows are chosen from scratch, as after a prompt, and
 * not for a zone that was cut. A refresh looks at a part of the pages.
 */
ObserveRules observe_rules(const PRKVRules& rules, const KeptChange& change) {
  ObserveRules own{true, true, 1, 0, {}};
  if (change.fresh()) {
    own.top = rules.automatic() && !change.cut() ? rules.budget : 0;
    return own;
  }
  const SequenceView& zone = change.after;
  const int64_t pages = ZonePages::of(zone.zone_begin, zone.zone_end, rules.page).count;
  own.filter = {rules.page, rules.looked_at(pages), PRKVRules::kLatestLookedAt};
  return own;
}

PageNumbers numbers_of(const PageLayout& layout, char* block, int64_t head, int64_t i) {
  return {layout.live(block, head, i), layout.unit(block, head, i), layout.digest(block, head, i)};
}

/** How the budget is split for a block that rows are chosen for. */
PRKVSplit split_of(const ModelShape& shape, const PRKVRules& rules, const KeptChange& change,
                   const Choice& choice) {
  if (!rules.automatic()) return rules.split(rules.static_pages);
  if (change.cut() || !change.fresh()) {
    return *amended_of(shape, change.before.kept_capacity).split(change.before[Part::kKept]);
  }
  int64_t agreed = 0, compared = 0;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    agreed += choice.agreed[head];
    compared += choice.compared[head];
  }
  return rules.split(compared == 0 ? 0 : agreed / (compared * rules.page));
}

/** Writes the pages that a head's kept rows come from, without these. */
void amend(const Kernels& kernels, const ModelShape& shape, const PRKVRules& rules,
           const KeptChange& change, int64_t head) {
  const SequenceView& sequence = change.after;
  const KeptLayout kept = shape.kept(sequence.kept_capacity);
  const AmendedLayout amended = amended_of(shape, sequence.kept_capacity);
  const PageLayout whole = pages_of(shape, rules.page);
  char* digests = amended.digests(sequence[Part::kKept]);
  const int32_t* positions = kept.positions(sequence[Part::kKept], head);
  const int64_t rows = kept.counts(sequence[Part::kKept], head)[0], size = rules.page;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++count) {
    const int64_t page = positions[i] / size, begin = page * size;
    uint8_t* segment = sequence.summaries[begin / shape.segment_tokens];
    uint64_t live = *whole.live(segment, head, page % whole.pages);
    for (; i < rows && positions[i] / size == page; ++i) {
      live &= ~(uint64_t{1} << (positions[i] - begin));
    }
    amended.numbers(sequence[Part::kKept], head)[count] = page;
    digest_page(kernels, shape, rules.box, {sequence, head, begin, live},
                numbers_of(amended.pages(), digests, head, count));
  }
  *amended.count(sequence[Part::kKept], head) = count;
}

}  // namespace

void PRKVSearch::reserve_choice(const std::vector<KeptChange>& changes) {
  int64_t bytes = 0;
  for (const KeptChange& change : changes) {
    bytes = std::max(bytes, choice_bytes(shape_, observe_rules(rules_, change), &change, 1));
  }
  step_.scratch().reserve(bytes);
}

void PRKVSearch::choose(const std::vector<KeptChange>& changes, Stream) {
  for (const KeptChange& change : changes) {
    const ObserveRules rules = observe_rules(rules_, change);
    Cutter cutter(step_.scratch().data());
    const Choice choice = Choice::cut(shape_, rules, most_rows(rules, change), cutter);
    pariskv::cpu::observe(device_.kernels, device_.pool, shape_, rules, change, choice);
    const PRKVSplit split = split_of(shape_, rules_, change, choice);
    *amended_of(shape_, change.after.kept_capacity).split(change.after[Part::kKept]) = split;
    device_.pool.parallel_for(shape_.kv_heads, [&](int64_t head) {
      take_best(choice, head, split.rows, uint64_t(shape_.group));
      fill_kept(shape_, change, choice, head, 0);
      if (rules_.has_pages()) amend(device_.kernels, shape_, rules_, change, head);
    });
  }
}

}  // namespace pariskv::cpu
