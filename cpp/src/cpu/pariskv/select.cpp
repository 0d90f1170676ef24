// Exact selection of candidates on small integers: histogram, threshold, compaction.
#include <algorithm>

#include "cpu/pariskv/search.h"

namespace pariskv::cpu {

void ParisKVSearch::select(const SearchArgs& args) {
  const ModelShape& shape = args.shape();
  device_.pool.parallel_for(int64_t(args.items.size()) * shape.kv_heads, [&](int64_t task) {
    const SearchItem& item = args.items[task / shape.kv_heads];
    const int64_t head = task % shape.kv_heads;
    const int64_t zone = item.sequence.zone_tokens();
    const int64_t segments = (item.sequence.zone_end - 1) / shape.segment_tokens -
                             item.sequence.zone_begin / shape.segment_tokens + 1;

    int64_t histogram[256] = {};
    const int32_t* counted = item.histograms + head * segments * 256;
    for (int64_t i = 0; i < segments * 256; ++i) histogram[i % 256] += counted[i];

    // The highest threshold that leaves enough; score 0 marks unusable keys and never passes.
    int64_t above = 0;
    int threshold = 255;
    while (threshold > 1 && above + histogram[threshold] < item.candidates()) {
      above += histogram[threshold--];
    }
    item.least[head] = uint8_t(threshold);
    int64_t ties = std::min(histogram[threshold], item.candidates() - above);

    item.candidate_count[head] =
        device_.kernels.collect(item.scores + head * zone, zone, uint8_t(threshold), &ties, 0,
                                item.candidate + head * (item.candidates() + kCollectSlack));
  });
}

}  // namespace pariskv::cpu
