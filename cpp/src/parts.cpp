#include "parts.h"

#include "search.h"

namespace pariskv {

PartSize part_size(Part part, const ModelShape& shape, const Search& search,
                   const SequenceView& view) {
  const Needs& needs = search.needs();
  const auto zeroed = [](int64_t bytes) { return PartSize{bytes, bytes}; };
  switch (part) {
    case Part::kState:
      return zeroed(needs.state_bytes);
    case Part::kRowCache:
      if (shape.cached_rows == 0) break;
      return {shape.row_cache().bytes(), shape.row_cache().rows()};
    case Part::kTailCopies:
      if (needs.tail_rows == 0 || shape.layout.borrowed) break;
      return {shape.tail_copies(Tail::capacity(needs.tail_rows)).bytes(), 0};
    case Part::kKept:
      if (view.kept_capacity == 0) break;
      return {search.kept_block_bytes(view.kept_capacity), 0};
    case Part::kRecent:
      if (shape.recent == 0) break;
      return zeroed(shape.recent_queries().bytes());
  }
  return {0, 0};
}

}  // namespace pariskv
