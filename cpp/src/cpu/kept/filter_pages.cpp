// The pages that are looked at most, by their digests: a choice of kept rows looks at their rows.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cpu/kept/observer.h"
#include "cpu/rows.h"
#include "policy/prkv/pages.h"

namespace pariskv::cpu {

/** The pages of the zone, as rows to choose from: each is seen from its first position on. */
void Observer::list_pages(int64_t head) {
  const ZonePages zone = pages();
  int32_t* positions = choice_.positions + head * choice_.width;
  for (int64_t p = 0; p < zone.count; ++p) {
    positions[p] = int32_t((zone.first + p) * rules_.filter.page);
  }
  choice_.counts[head] = zone.count;
}

/**
 * Logits of a tile of pages: q c + |q| r of their digests. The middle is rounded as a key is, less
 * the reference; the distance to 8 bits of its own.
 */
void Observer::set_page_logits(int64_t head, int64_t tile, const Askers& askers) {
  const int64_t first = tile * kTile, count = std::min(kTile, choice_.counts[head] - first);
  const int64_t dim = shape_.rows.key_dim;
  const PageLayout layout = pages_of(shape_, rules_.filter.page);
  const void* rows[kTile];
  alignas(64) float numbers[kTile * kMaxHeadDim];
  uint8_t exponents[2][kTile];
  int32_t dots[kQueriesAtOnce * kTile];
  int16_t sizes[kQueriesAtOnce * kMaxHeadDim];
  for (int part = 0; part < 2; ++part) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t page = pages().first + first + r, slot = page % layout.pages;
      uint8_t* block = change_.after.summaries[page / layout.pages];
      const float unit = *layout.unit(block, head, slot);
      const bool live = *layout.live(block, head, slot) != 0;
      float* own = numbers + r * dim;
      kernels_.to_float(layout.digest(block, head, slot) + part * dim, RowType::kFloat16, dim, own);
      for (int64_t d = 0; d < dim; ++d) own[d] = own[d] * unit;
      for (int64_t d = 0; d < dim && part == 0; ++d) own[d] = own[d] - reference_[d];
      if (!live) std::fill_n(own, dim, NAN);  // it has no digest
      rows[r] = own;
    }
    int64_t done = askers.begin;
    do {  // once without askers as well: it tells which pages are usable
      const int64_t some = std::min(kQueriesAtOnce, askers.end - done);
      const int16_t* query = choice_.numbers + done * dim;
      if (part == 1) {
        std::transform(query, query + some * dim, sizes, [](int16_t x) { return std::abs(x); });
        query = sizes;
      }
      kernels_.round_dots(
          {rows, count, RowType::kFloat32, dim, some, query, dots, exponents[part]});
      float steps[kTile];
      for (int64_t r = 0; r < count; ++r) {
        steps[r] = exponents[part][r] == 255 ? 0 : key_step(exponents[part][r]);
      }
      for (int64_t q = 0; q < some; ++q) {
        const RecentScale& scale = choice_.scales[done + q];
        int32_t* logits = logits_of(done + q - askers.begin, first);
        int32_t own[kTile];
        std::fill_n(own, count, kNoLogit);
        kernels_.step_logits({dots + q * count, steps, count, scale.unit,
                              part == 0 ? choice_.offsets[done + q] : 0, kNoCap, own});
        const int32_t most = scale.most < kMostLogit ? scale.most : kNoCap;
        for (int64_t r = 0; r < count; ++r) {
          logits[r] = part == 0 ? own[r] : std::clamp(logits[r] + own[r], -most, most);
        }
      }
      done += some;
    } while (done < askers.end);
  }
  for (int64_t r = 0; r < count; ++r) {
    exponents[0][r] = std::max(exponents[0][r], exponents[1][r]);
  }
  hide(head, tile, askers, 0, exponents[0]);
}

/** The rows of the pages that are chosen, those that were kept before, and the latest ones. */
void Observer::list_rows_of_pages(int64_t head) {
  const int64_t at = head * choice_.width, size = rules_.filter.page;
  const int64_t first_page = pages().first, end = change_.after.zone_end;
  const int64_t latest = std::max(end - rules_.filter.latest, change_.after.zone_begin);
  const KeptLayout before = shape_.kept(change_.before.kept_capacity);
  const int32_t* kept = before.positions(change_.before[Part::kKept], head);
  const int32_t kept_count = before.counts(change_.before[Part::kKept], head)[0];
  int64_t count = 0;
  int32_t next = 0;
  for (int64_t p = change_.after.zone_begin; p < end; ++p) {
    const bool was_kept = next < kept_count && kept[next] == p;
    const bool chosen = choice_.usable[at + p / size - first_page] == kChosen;
    if (was_kept || chosen || p >= latest) {
      choice_.positions[at + count] = int32_t(p);
      choice_.sources[at + count] = was_kept ? next : kStored;
      choice_.ages[at + count++] = kNewcomer;
    }
    next += was_kept;
  }
  choice_.counts[head] = count;
}

}  // namespace pariskv::cpu
