// The coarse scan of whole zones, with a histogram of the scores.
#include <algorithm>
#include <cstring>

#include "cpu/pariskv/search.h"

namespace pariskv::cpu {

namespace {

/** Scores equal to each value. Four tables, since runs of equal scores would wait on one. */
void count_scores(const uint8_t* scores, int64_t count, int32_t* histogram) {
  int32_t tables[4][256] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) ++tables[lane][scores[i + lane]];
  }
  for (; i < count; ++i) ++tables[0][scores[i]];
  for (int64_t value = 0; value < 256; ++value) {
    histogram[value] = tables[0][value] + tables[1][value] + tables[2][value] + tables[3][value];
  }
}

}  // namespace

void ParisKVSearch::score(const SearchArgs& args) {
  const ModelShape& shape = args.shape();
  const SummaryLayout layout = args.layout();
  const int64_t tokens = shape.segment_tokens;

  // Tasks of all sequences in one line: task -> (sequence, head, segment).
  const auto segments_of = [&](const SearchItem& item) {
    return (item.sequence.zone_end - 1) / tokens - item.sequence.zone_begin / tokens + 1;
  };
  int64_t tasks = 0;
  for (int64_t i = 0; i < int64_t(args.items.size()); ++i)
    tasks += segments_of(args.items[i]) * shape.kv_heads;

  device_.pool.parallel_for(tasks, [&](int64_t task) {
    const SearchItem* item = args.items.data();
    while (task >= segments_of(*item) * shape.kv_heads) {
      task -= segments_of(*item++) * shape.kv_heads;
    }
    const int64_t segments = segments_of(*item);
    const int64_t head = task / segments;
    const int64_t zone_begin = item->sequence.zone_begin, zone_end = item->sequence.zone_end;
    const int64_t segment = zone_begin / tokens + task % segments;
    const int64_t begin = std::max(zone_begin, segment * tokens);
    const int64_t end = std::min(zone_end, (segment + 1) * tokens);

    uint8_t* block = item->sequence.summaries[segment];
    const uint8_t* signs = layout.signs(block, head, begin % tokens);
    const uint8_t* norms = layout.norms(block, head, begin % tokens);
    if (end < zone_end) {  // the next task's keys, since nothing else tells where they are
      uint8_t* next = item->sequence.summaries[segment + 1];
      const int64_t bytes = std::min(tokens, zone_end - end) * layout.subspaces();
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(layout.signs(next, head, 0) + byte, 0, 2);
      }
    }
    uint8_t* scores = item->scores + head * item->sequence.zone_tokens() + begin - zone_begin;
    const int64_t query = head * args.rules().searchers;
    if (args.rules().scorer == Scorer::kSignNorm) {
      ScoreSignsRun run{};
      run.signs = signs, run.norm_codes = norms, run.count = end - begin;
      run.subspaces = layout.subspaces(), run.heads = args.rules().searchers;
      run.query = item->quantised + query * layout.rotated_dim;
      run.slope = item->slope + query, run.variance_term = item->variance_term + query;
      run.offset = item->offset + query, run.octave = item->octave[head];
      run.scores = scores;
      if (item->blocks > 0) {
        run.block = layout.block;
        run.step_stride = item->blocks;
        run.per_step = item->per_step + query;
        run.steps =
            item->block_steps + query * item->blocks + begin / layout.block - item->first_block;
        // The zone may begin within a block: what is left of it is a run of its own.
        const int64_t cut = begin % layout.block;
        if (cut > 0) {
          run.count = std::min(layout.block - cut, end - begin);
          device_.kernels.score_signs(run);
          run.signs += run.count * layout.subspaces(), run.norm_codes += run.count;
          run.scores += run.count, ++run.steps;
          run.count = end - begin - run.count;
        }
      }
      device_.kernels.score_signs(run);
    } else {
      device_.kernels.score_votes({signs, norms, end - begin, layout.subspaces(),
                                   args.rules().searchers,
                                   item->votes + query * layout.subspaces() * 256, scores});
    }
    count_scores(scores, end - begin, item->histograms + task * 256);
  });
}

}  // namespace pariskv::cpu
