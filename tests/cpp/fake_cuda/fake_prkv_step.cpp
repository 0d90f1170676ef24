// PRKV's step, as far as the host can tell: it is told of every zone in time, and has room for it.
#include <cstring>

#include "fake_pages.h"
#include "prkv/decode/call.h"

namespace pariskv::cuda {

using test::launch;

namespace {

template <typename Visit>
void each_sequence(const PageDecodeCall& call, Visit visit) {
  for (int64_t i = 0; i < call.batch; ++i) {
    const KeptSlot& slot = call.slots[i];
    if (slot.layers != nullptr) visit(slot, slot.layers[call.layer], i);
  }
}

/** There is room for the pages of a zone, and they have what a step goes by. */
void check_zone(const PageDecodeCall& call, const KeptSlot& slot, const SequenceView& view) {
  const int64_t page = call.rules.page, first = view.zone_begin / page;
  const int64_t last = (view.zone_end - 1) / page;
  if (last + 1 - first > slot.page_capacity) complain("there is no room for the pages of a zone");
  check_pages(view, call.shape, call.rules);
}

}  // namespace

PageScratchLayout PageScratchLayout::of(const ModelShape& shape, const PRKVRules& rules) {
  PageScratchLayout layout{};
  layout.fetched = kept_decode_bytes(shape);
  layout.search = layout.fetched + 256;
  layout.scores = layout.search + 512;
  layout.page = rules.page;
  layout.most_pages = rules.most_pages();
  return layout;
}

void launch_page_decode(const PageDecodeCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    each_sequence(call, [&](const KeptSlot& slot, const SequenceView& view, int64_t i) {
      if (!view.dense()) check_zone(call, slot, view);
      std::memset(slot.scratch, 0, size_t(call.shape.kv_heads * slot.head_bytes));
      if (call.k.data != nullptr) append_token(call.shape, view, call.k, call.v, i);
    });
  });
  launch(stream, [call] {
    each_sequence(call, [&](const KeptSlot&, const SequenceView& view, int64_t) {
      if (call.k.data == nullptr || view[Part::kRecent] == nullptr) return;
      const RecentLayout layout = call.shape.recent_queries();
      const int64_t position = view.total - 1;
      *layout.position(view[Part::kRecent], layout.slot_of(position)) = position + 1;
    });
  });
}

}  // namespace pariskv::cuda
