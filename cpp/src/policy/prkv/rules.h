/** The constants of a decode by PRKV: they never change in the life of a cache. */
#pragma once

#include <cstdint>

namespace pariskv {

/** How a budget is spent: rows that are kept, and pages that are found for each query. */
struct PRKVSplit {
  int64_t rows, pages;

  /** Of so many pages' worth of kept rows: what whole pages leave over goes to rows, if any. */
  static constexpr PRKVSplit of(int64_t budget, int64_t page, int64_t static_pages) {
    const int64_t all = budget / page;
    const int64_t kept = static_pages < all ? static_pages : all;
    return {kept == 0 ? 0 : budget - (all - kept) * page, all - kept};
  }
};

/** The pages of a zone, the first of which the sink may cut short. */
struct ZonePages {
  int64_t first, count;

  static constexpr ZonePages of(int64_t zone_begin, int64_t zone_end, int64_t page) {
    const int64_t first = zone_begin / page;
    return {first, (zone_end - 1) / page + 1 - first};
  }
};

struct PRKVRules {
  int64_t budget;        // rows of a zone that a step attends to per kv head, at most
  int64_t page;          // neighbours
  int64_t static_pages;  // pages' worth of rows that are kept; kAuto: the prompt's queries say it
  bool box;              // a page's digest is a bound of its keys, else their mean distance
  int64_t least_looked_at = kLeastLookedAt;  // rows

  static constexpr int64_t kAuto = -1;

  // A refresh looks at a quarter of the pages, and at so many rows at least: at 8K and 16K a
  // quarter loses .017 and .010 of the attention in the worst layer, at 32K .004
  // (bench/notes/tried-quality.md).
  static constexpr int64_t kLeastLookedAt = 8192, kPartLookedAt = 4;
  /** Rows that it looks at besides: those of a flush, and as many before them. */
  static constexpr int64_t kLatestLookedAt = 256;

  constexpr bool automatic() const { return static_pages == kAuto; }
  constexpr PRKVSplit split(int64_t of_static_pages) const {
    return PRKVSplit::of(budget, page, of_static_pages);
  }
  /** Rows that are kept, at most. */
  int64_t most_kept() const { return automatic() ? budget : split(static_pages).rows; }
  /** Pages are looked for by some step. */
  constexpr bool has_pages() const { return automatic() || split(static_pages).pages > 0; }
  /** Pages that a step finds while nothing is kept: they have the whole budget. */
  int64_t most_pages() const { return has_pages() ? budget / page : 0; }
  int64_t rows_per_head() const { return most_pages() * page; }

  /** The best of so many pages that a refresh looks at; 0: at all rows of the zone. */
  constexpr int64_t looked_at(int64_t pages) const {
    const int64_t part = (pages + kPartLookedAt - 1) / kPartLookedAt;
    const int64_t least = (least_looked_at + page - 1) / page;
    const int64_t wanted = part < least ? least : part;
    return has_pages() && wanted < pages ? wanted : 0;
  }
};

}  // namespace pariskv
