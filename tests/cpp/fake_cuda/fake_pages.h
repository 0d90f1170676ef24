/** Digests of pages, for kernels that are host code: they say which rows they are of. */
#pragma once

#include <cstring>

#include "fake_kept.h"
#include "policy/prkv/pages.h"

namespace pariskv::cuda {

/** A page of a block of digests. */
struct Page {
  const PageLayout& layout;
  char* block;
  int64_t head, i;

  uint64_t& live() const { return *layout.live(block, head, i); }
  /** Which rows it is of, and that they are what they were. */
  bool is_of(const SequenceView& view, const ModelShape& shape, int64_t begin,
             uint64_t rows) const {
    uint16_t expected[2];
    make(view, shape, begin, rows, expected);
    return live() == rows && std::memcmp(expected, layout.digest(block, head, i), 4) == 0;
  }
  void write(const SequenceView& view, const ModelShape& shape, int64_t begin,
             uint64_t rows) const {
    live() = rows;
    *layout.unit(block, head, i) = 1;
    make(view, shape, begin, rows, layout.digest(block, head, i));
  }

 private:
  void make(const SequenceView& view, const ModelShape& shape, int64_t begin, uint64_t rows,
            uint16_t* out) const {
    out[0] = out[1] = 0;
    for (int64_t r = 0; r < 64; ++r) {
      if ((rows >> r & 1) == 0) continue;
      uint16_t number = 0;
      std::memcpy(&number, row_of(view, shape, head, begin + r), sizeof number);
      out[0] = uint16_t(out[0] + number), out[1] = uint16_t(out[1] * 31 + r);
    }
  }
};

inline Page page_of(const SequenceView& view, const PageLayout& layout, int64_t head,
                    int64_t page) {
  char* block = reinterpret_cast<char*>(view.summaries[page / layout.pages]);
  return {layout, block, head, page % layout.pages};
}

/** Rows of a page from position `first` on. */
inline uint64_t rows_from(int64_t first, int64_t begin, int64_t size) {
  const uint64_t all = ~uint64_t{0} >> (64 - size);
  return first <= begin ? all : all >> (first - begin) << (first - begin);
}

/** All pages of a zone have their digests. */
inline void check_digests(const SequenceView& view, const ModelShape& shape,
                          const PRKVRules& rules) {
  const PageLayout layout = pages_of(shape, rules.page);
  for (int64_t page = view.zone_begin / rules.page; page * rules.page < view.zone_end; ++page) {
    const int64_t begin = page * rules.page;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const uint64_t rows = rows_from(view.zone_begin, begin, rules.page);
      if (!page_of(view, layout, head, page).is_of(view, shape, begin, rows)) {
        return complain("a page has not its digest");
      }
    }
  }
}

/** Amended pages are those that kept rows come from, without these. */
inline void check_amended(const SequenceView& view, const ModelShape& shape,
                          const PRKVRules& rules) {
  const AmendedLayout amended = amended_of(shape, view.kept_capacity);
  const PageLayout layout = amended.pages(), whole = pages_of(shape, rules.page);
  const KeptLayout kept = shape.kept(view.kept_capacity);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    const int32_t* positions = kept.positions(view[Part::kKept], head);
    const int32_t rows = kept.counts(view[Part::kKept], head)[0];
    int64_t count = 0;
    for (int32_t i = 0; i < rows; ++count) {
      const int64_t page = positions[i] / rules.page, begin = page * rules.page;
      uint64_t live = page_of(view, whole, head, page).live();
      for (; i < rows && positions[i] / rules.page == page; ++i) {
        live &= ~(uint64_t{1} << (positions[i] - begin));
      }
      const Page own{layout, amended.digests(view[Part::kKept]), head, count};
      if (count >= *amended.count(view[Part::kKept], head) ||
          amended.numbers(view[Part::kKept], head)[count] != page ||
          !own.is_of(view, shape, begin, live)) {
        return complain("a page is not amended");
      }
    }
    if (count != *amended.count(view[Part::kKept], head)) complain("a page is amended for nothing");
  }
}

/** All that a step over a zone goes by. */
inline void check_pages(const SequenceView& view, const ModelShape& shape, const PRKVRules& rules) {
  if (rules.has_pages()) check_digests(view, shape, rules);
  if (view[Part::kKept] == nullptr) return;
  check_kept(view, shape);
  const PRKVSplit split = *amended_of(shape, view.kept_capacity).split(view[Part::kKept]);
  if (split.rows + split.pages * rules.page > rules.budget) complain("a budget is split anyhow");
  if (rules.has_pages()) check_amended(view, shape, rules);
}

}  // namespace pariskv::cuda
