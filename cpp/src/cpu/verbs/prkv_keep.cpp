// PRKV's choice of the rows that are kept, and the pages that are left without them.
#include <algorithm>
#include <cstring>

#include "cpu/choice.h"
#include "cpu/digest.h"
#include "cpu/prkv_step.h"
#include "policy/prkv/pages.h"

namespace pariskv::cpu {

namespace {

/**
 * The budget is split by agreement only where rows are chosen from scratch, as after a prompt. A
 * refresh looks at a part of the pages.
 */
ObserveRules observe_rules(const PRKVRules& rules, const KeptChange& change) {
  ObserveRules own{true, true, 1, 0, {}};
  if (change.cut()) return own;
  if (change.fresh()) {
    own.top = rules.automatic() ? rules.budget : 0;
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
PRKVSplit split_of(const PRKVKeep& args, const KeptChange& change, const Choice& choice) {
  const PRKVRules& rules = args.rules;
  if (!rules.automatic()) return rules.split(rules.static_pages);
  if (!change.fresh()) {
    return *amended_of(args.shape, change.before.kept_capacity).split(change.before.kept);
  }
  int64_t agreed = 0, compared = 0;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    agreed += choice.agreed[head];
    compared += choice.compared[head];
  }
  return rules.split(compared == 0 ? 0 : agreed / (compared * rules.page));
}

/** Writes the pages that a head's kept rows come from, without these. */
void amend(const Kernels& kernels, const PRKVKeep& args, const KeptChange& change, int64_t head) {
  const ModelShape& shape = args.shape;
  const SequenceView& sequence = change.after;
  const KeptLayout kept = shape.kept(sequence.kept_capacity);
  const AmendedLayout amended = amended_of(shape, sequence.kept_capacity);
  const PageLayout whole = pages_of(shape, args.rules.page);
  char* digests = amended.digests(sequence.kept);
  const int32_t* positions = kept.positions(sequence.kept, head);
  const int64_t rows = kept.counts(sequence.kept, head)[0], size = args.rules.page;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++count) {
    const int64_t page = positions[i] / size, begin = page * size;
    uint8_t* segment = sequence.summaries[begin / shape.segment_tokens];
    uint64_t live = *whole.live(segment, head, page % whole.pages);
    for (; i < rows && positions[i] / size == page; ++i) {
      live &= ~(uint64_t{1} << (positions[i] - begin));
    }
    amended.numbers(sequence.kept, head)[count] = page;
    digest_page(kernels, shape, args.rules.box, {sequence, head, begin, live},
                numbers_of(amended.pages(), digests, head, count));
  }
  *amended.count(sequence.kept, head) = count;
}

/** The same of a zone that was cut: the pages that are left. */
void trim_amended(const PRKVKeep& args, const KeptChange& change, int64_t head) {
  const AmendedLayout before = amended_of(args.shape, change.before.kept_capacity);
  const AmendedLayout after = amended_of(args.shape, change.after.kept_capacity);
  char *from = change.before.kept, *to = change.after.kept;
  int64_t count = 0;
  for (; count < *before.count(from, head); ++count) {
    const int64_t page = before.numbers(from, head)[count];
    if (page * args.rules.page >= change.after.zone_end) break;
    const PageNumbers old = numbers_of(before.pages(), before.digests(from), head, count);
    const PageNumbers own = numbers_of(after.pages(), after.digests(to), head, count);
    after.numbers(to, head)[count] = page;
    *own.live = *old.live;
    *own.unit = *old.unit;
    std::copy_n(old.digest, 2 * args.shape.rows.key_dim, own.digest);
  }
  *after.count(to, head) = count;
}

}  // namespace

int64_t PRKVStep::scratch_bytes(const PRKVKeep& args) const {
  int64_t bytes = 0;
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    bytes =
        std::max(bytes, choice_bytes(args.shape, observe_rules(args.rules, change), &change, 1));
  }
  return bytes;
}

void PRKVStep::keep_up(const PRKVKeep& args) {
  const ModelShape& shape = args.shape;
  const bool pages = args.rules.has_pages();
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    PRKVSplit* split = amended_of(shape, change.after.kept_capacity).split(change.after.kept);
    if (change.cut()) {
      *split = *amended_of(shape, change.before.kept_capacity).split(change.before.kept);
      pool_.parallel_for(shape.kv_heads, [&](int64_t head) {
        trim_kept(shape, change, head);
        if (pages) trim_amended(args, change, head);
      });
      continue;
    }
    const ObserveRules rules = observe_rules(args.rules, change);
    Cutter cutter(scratch_.as<char>());
    const Choice choice = Choice::cut(shape, rules, most_rows(rules, change), cutter);
    observe(kernels_, pool_, shape, rules, change, choice);
    *split = split_of(args, change, choice);
    pool_.parallel_for(shape.kv_heads, [&](int64_t head) {
      take_best(choice, head, split->rows, uint64_t(shape.group));
      fill_kept(shape, change, choice, head, 0);
      if (pages) amend(kernels_, args, change, head);
    });
  }
}

}  // namespace pariskv::cpu
