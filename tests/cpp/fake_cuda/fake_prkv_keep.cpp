// PRKV's kernels for zones that change, as far as the host can tell: which rows are kept is decided
// by their positions alone; digests say which rows they are of; and every choice checks that pages
// have theirs.
#include <algorithm>

#include "fake_pages.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kScratch = 1 << 10;

using test::launch;

void digest(const DigestCall& call, const DigestSpan& span) {
  const int64_t size = call.rules.page;
  const PageLayout layout = pages_of(call.shape, size);
  if (span.begin >= span.end || span.end % size != 0) complain("a span that is no pages");
  for (int64_t page = span.begin / size; page * size < span.end; ++page) {
    for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
      page_of(*span.sequence, layout, head, page)
          .write(*span.sequence, call.shape, page * size, rows_from(span.begin, page * size, size));
    }
  }
}

void amend(const PRKVChoiceCall& call, const ChoiceJob& job, int64_t head) {
  const ModelShape& shape = call.choice.shape;
  const int64_t size = call.rules.page;
  const KeptLayout kept = shape.kept(job.after_capacity);
  const AmendedLayout amended = amended_of(shape, job.after_capacity);
  const PageLayout layout = amended.pages();
  const int32_t rows = kept.counts(job.after, head)[0];
  int64_t& count = *amended.count(job.after, head);
  count = 0;
  for (int32_t i = 0; i < rows;) {
    const int64_t page = kept.positions(job.after, head)[i] / size;
    uint64_t live = page_of(*job.sequence, pages_of(shape, size), head, page).live();
    for (; i < rows && kept.positions(job.after, head)[i] / size == page; ++i) {
      live &= ~(uint64_t{1} << kept.positions(job.after, head)[i] % size);
    }
    amended.numbers(job.after, head)[count] = page;
    Page{layout, amended.digests(job.after), head, count++}.write(*job.sequence, shape, page * size,
                                                                  live);
  }
}

/** A refresh looks at the pages that it is to, and knows what was kept before. */
void check_looked_at(const PRKVChoiceCall& call, int64_t i) {
  const ChoiceJob& job = call.choice.jobs[i];
  const int64_t page = call.rules.page, first = job.added / page;
  const int64_t pages = (job.zone_end - 1) / page + 1 - first;
  const int64_t wanted = job.before == nullptr ? 0 : call.rules.looked_at(pages);
  if (call.wanted[i] != wanted) complain("a choice looks at other pages");
  if ((wanted > 0) != (call.choice.scratch.listed != 0)) complain("rows are not listed");
  if (wanted == 0) return;
  if (call.pages < pages) complain("a launch does not reach all pages");
  const int64_t rows = wanted * page + PRKVRules::kLatestLookedAt + job.before_capacity;
  if (call.choice.scratch.width < std::min(job.zone_end - job.added, rows)) {
    complain("there is no room for all rows to look at");
  }
}

void choose(const PRKVChoiceCall& call, int64_t i) {
  const ChoiceJob& job = call.choice.jobs[i];
  const ModelShape& shape = call.choice.shape;
  if (call.rules.has_pages()) check_digests(*job.sequence, shape, call.rules);
  PRKVSplit* split = amended_of(shape, job.after_capacity).split(job.after);
  *split = call.compares               ? call.rules.split(1)
           : call.before[i] != nullptr ? *call.before[i]
                                       : call.rules.split(call.rules.static_pages);
  if (job.rows != &split->rows) complain("a choice of another number of rows");
  check_looked_at(call, i);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    std::vector<Row> attended;
    for (int64_t p = job.added; p < job.zone_end; ++p) {
      const bool wanted = (p * 7 + head + job.zone_end) % 3 != 0;
      if (!wanted || int64_t(attended.size()) >= *job.rows) continue;
      attended.push_back({int32_t(p), 0, row_of(*job.sequence, shape, head, p)});
    }
    fill(shape.kept(job.after_capacity), job.after, head, attended, {});
    if (call.rules.has_pages()) amend(call, job, head);
  }
}

}  // namespace

void launch_digest(const DigestCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    for (int64_t i = 0; i < call.count; ++i) digest(call, call.spans[i]);
  });
}

ChoiceScratch prkv_choice_scratch(const ModelShape&, int64_t width, int64_t, bool listed) {
  ChoiceScratch scratch{};
  scratch.width = width;
  scratch.listed = listed ? kScratch : 0;
  scratch.bytes = kScratch + (listed ? 2 : 1) * width;
  return scratch;
}

LookScratch look_scratch(const ModelShape&, int64_t width, bool compares, bool) {
  LookScratch scratch{};
  scratch.bytes = width + (compares ? 2 : 1) * kScratch;
  return scratch;
}

void launch_prkv_choice(const PRKVChoiceCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    const ChoiceCall& own = call.choice;
    std::memset(own.space, 1, size_t(own.count * own.heads * own.scratch.bytes));
    std::memset(call.look_space, 1, size_t(own.count * call.heads_at_once * call.look.bytes));
    for (int64_t i = 0; i < own.count; ++i) check_asked(own.shape, own.jobs[i]);
  });
  launch(stream, [call] {
    for (int64_t i = 0; i < call.choice.count; ++i) choose(call, i);
  });
}

}  // namespace pariskv::cuda
