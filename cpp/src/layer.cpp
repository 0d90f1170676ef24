#include "layer.h"

#include <algorithm>

namespace pariskv {

SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Search& search,
                     StepFacts facts) {
  SequenceView view{};
  view.total = regions.total();
  view.zone_begin = regions.sink_end(sizes);
  view.zone_end = regions.retrieval_end(sizes);
  view.kept_capacity = search.kept_rows(view.zone_tokens());
  facts.total = view.total;
  facts.leaves_out = search.plan(view);
  facts.awaits_choice &= view.kept_capacity > 0 && search.needs().waits_for_kept;
  view.mode = mode_of(search.needs().steps, facts);
  return view;
}

Tail tail_of(const SequenceView& view, const Search& search) {
  return Tail::of(view.zone_begin, view.zone_end, search.needs().tail_rows,
                  uint32_t(view.tail_seed));
}

bool Marks::has_copies(const Tail& tail, const Search& search) const {
  return tail.shares_rows(copied) && tail.count <= copied.count &&
         common == common_rows(tail.count, search.needs().tail_rows);
}

void Marks::cut(int64_t total, int64_t zone_begin, int64_t zone_end) {
  queries.end = std::min(queries.end, total);
  queries.begin = std::min(queries.begin, queries.end);
  // Rows that come in their place are copied anew.
  copied.count = std::min(copied.count, copied.count_to(zone_end));
  dropped = dropped_of(total);
  narrow_end = std::min(narrow_end, zone_end);
  if (narrow_end <= zone_begin) narrow_end = 0;
}

StepFacts Layer::facts(int64_t near_from) const {
  StepFacts facts;
  facts.lacks_rows = any(marks.dropped);
  facts.awaits_choice = parts[Part::kKept] == nullptr;
  facts.near = near();
  facts.near_from = near_from;
  return facts;
}

SequenceView Layer::view(const RegionSizes& sizes, const Search& search, int64_t near_from) const {
  return placed(view_of(regions, sizes, search, facts(near_from)), places(), search);
}

SequenceView Layer::cut(const Regions& next, const RegionSizes& sizes, const Search& search) const {
  StepFacts after = facts(0);
  after.lacks_rows = any(marks.dropped_of(next.total()));
  after.awaits_choice = false;
  SequenceView view = placed(view_of(next, sizes, search, after), places(), search);
  view[Part::kKept] = nullptr;
  return view;
}

SequenceView Layer::placed(SequenceView view, const Places& places, const Search& search) const {
  view.rows = places.rows;
  view.summaries = places.summaries;
  view.narrow_rows = places.narrow_rows;
  view.generation = generation;
  view.tail_seed = tail_seed;
  view.device = tables.device();
  for (Part part : kAllParts) {
    view[part] = data_of(places.parts ? places.parts->newer(part, parts) : parts[part]);
  }
  // A block that is there may have what counts in another state.
  if (!places.marks->has_copies(tail_of(view, search), search)) view[Part::kTailCopies] = nullptr;
  if (view.kept_capacity == 0) view[Part::kKept] = nullptr;
  return view;
}

}  // namespace pariskv
