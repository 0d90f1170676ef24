// The query side of a search: rotated, quantised, brought to a common scale or turned to votes.
#include <algorithm>
#include <cmath>

#include "cpu/numerics.h"
#include "cpu/pariskv/search.h"
#include "cpu/plain/plain.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "policy/pariskv/codec/head_scale.h"

namespace pariskv::cpu {

namespace {

/** Query `searcher` of a head as floats: one of the group, or the group's mean. */
void load_query(const SearchArgs& args, const Kernels& kernels, int64_t row, int64_t head,
                int64_t searcher, float* query) {
  const ModelShape& shape = args.shape();
  const int64_t first = head * shape.group;
  if (args.rules().group_rule != GroupRule::kMeanQuery) {
    read_query(kernels, shape, args.decode.q, row, first + searcher, query);
    return;
  }
  float one[kMaxHeadDim];
  std::fill_n(query, shape.rows.key_dim, 0.0f);
  for (int64_t g = 0; g < shape.group; ++g) {
    read_query(kernels, shape, args.decode.q, row, first + g, one);
    for (int64_t d = 0; d < shape.rows.key_dim; ++d) query[d] = query[d] + one[d];
  }
  for (int64_t d = 0; d < shape.rows.key_dim; ++d) query[d] = query[d] / float(shape.group);
}

/** The balance of a head's channels, taken on by a query. */
void stretch(const SearchArgs& args, const SearchItem& item, int64_t head, float* query) {
  const int64_t dim = args.shape().rows.key_dim;
  const float* factors = item.balance.stretch + head * dim;
  for (int64_t c = 0; c < dim; ++c) query[c] = query[c] * factors[c];
}

/** H diag(s) q, without the 1 / sqrt; false, and all zero, when q is not finite. */
bool rotate(const SearchArgs& args, const float* query, float* rotated) {
  const int64_t dim = args.layout().rotated_dim, key_dim = args.shape().rows.key_dim;
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) {
    rotated[d] = d < key_dim ? query[d] * args.rules().codec->rotation_signs[d] : 0.0f;
  }
  plain::walsh_hadamard(rotated, dim);
  for (int64_t d = 0; d < dim; ++d) {
    finite = finite && std::fabs(rotated[d]) < INFINITY;
  }
  if (!finite) std::fill_n(rotated, dim, 0.0f);
  return finite;
}

/**
 * What some queries of a group find in the resident rows nearest to the zone's ends: the
 * log-sum-exp of their logits, roughly, from products of numbers of 8 bits.
 */
class Window {
 public:
  static constexpr int64_t kQueries = 16;

  Window(const ModelShape& shape, const Logits& logits, const SequenceView& sequence, int64_t head)
      : shape_(shape), logits_(logits) {
    const int64_t first = std::min(sequence.zone_begin, kFirstRows);
    // The newest row is left out: a GPU may be storing it at this moment.
    const int64_t last = sequence.total - 1;
    for (int64_t i = 0; i < first; ++i)
      keys_[count_++] = plain_row_at(shape, sequence, head, i).key;
    for (int64_t i = std::max(sequence.zone_end, last - kLastRows); i < last; ++i) {
      keys_[count_++] = plain_row_at(shape, sequence, head, i).key;
    }
  }

  /** A finite query (head_dim) to be the one at `index`. */
  void set(int64_t index, const float* query) {
    const float largest = largest_of(query, shape_.rows.key_dim);
    quantise(query, shape_.rows.key_dim, largest, kByteLevels,
             query_ + index * shape_.rows.key_dim);
    base_[index] = steps_per_unit(logits_.scale, largest);
  }

  void look(const Kernels& kernels, int64_t queries) {
    kernels.round_dots(
        {keys_, count_, shape_.rows.key, shape_.rows.key_dim, queries, query_, dots_, exponents_});
  }

  /** Of the query at `index`, in octaves; a finite `bias` is one logit more. */
  float log_sum_exp(int64_t index, const float* bias) const {
    const int32_t most = most_steps(logits_.softcap);
    int32_t steps[kWindowRows + 1];
    int64_t count = 0;
    for (int64_t r = 0; r < count_; ++r) {
      if (exponents_[r] == 255) continue;
      const float unit = finite_unit(base_[index] * key_step(exponents_[r]));
      steps[count++] = logit_steps(dots_[index * count_ + r], unit, most);
    }
    if (bias != nullptr && std::isfinite(*bias)) {
      steps[count++] = whole_steps(*bias * kOctaveSteps);
    }
    return sum_of_steps(steps, count);
  }

 private:
  const ModelShape& shape_;
  const Logits& logits_;
  const void* keys_[kWindowRows];
  int64_t count_ = 0;
  int16_t query_[kQueries * kMaxHeadDim] = {};
  float base_[kQueries] = {};
  int32_t dots_[kQueries * kWindowRows];
  uint8_t exponents_[kWindowRows];
};

/**
 * The votes of one subspace's 256 centroids: from the nearest to the query down, a centroid
 * gets one vote for every tier in which the keys before it leave room.
 */
void cast_votes(const float* part, const int32_t* counts, int64_t keys, double vote_ratio,
                uint8_t* votes) {
  constexpr double kTiers[] = {.05, .15, .30, .50, .75, 1};
  float nearness[256];
  uint8_t order[256];
  for (int id = 0; id < 256; ++id) {
    float sum = 0;
    for (int j = 0; j < kSubspaceDim; ++j) sum = sum + (id >> j & 1 ? part[j] : -part[j]);
    nearness[id] = sum;
    order[id] = uint8_t(id);
  }
  std::sort(order, order + 256, [&](uint8_t a, uint8_t b) {
    return nearness[a] != nearness[b] ? nearness[a] > nearness[b] : a < b;
  });
  int64_t room[6];
  for (int t = 0; t < 6; ++t) room[t] = int64_t(std::ceil(double(keys) * vote_ratio * kTiers[t]));
  int64_t before = 0;
  for (const uint8_t id : order) {
    int tiers = 0;
    for (const int64_t limit : room) tiers += before < limit;
    votes[id] = uint8_t(tiers);
    before += counts[id];
  }
}

/** A searcher on its way: its query, and where its results go. */
struct Searcher {
  int64_t number;  // of all searchers of the item
  bool finite;
  float query[kMaxHeadDim];
  float stretched[kMaxHeadDim];  // set where there are blocks
  float rotated[kMaxRotatedDim];
};

void prepare(const SearchArgs& args, const Kernels& kernels, const SearchItem& item, int64_t head,
             int64_t index, Searcher& searcher) {
  const int64_t dim = args.layout().rotated_dim;
  // Folded into the query once instead of into every key: 1 / sqrt of the rotation, the 255
  // steps of a weight, and the scale of a logit.
  const float factor = args.decode.logits.scale / std::sqrt(float(dim)) / 255.0f;
  searcher.number = head * args.rules().searchers + index;
  load_query(args, kernels, item.row, head, index, searcher.query);
  if (item.blocks == 0) {
    searcher.finite = rotate(args, searcher.query, searcher.rotated);
  } else {
    std::copy_n(searcher.query, args.shape().rows.key_dim, searcher.stretched);
    stretch(args, item, head, searcher.stretched);
    searcher.finite = rotate(args, searcher.stretched, searcher.rotated);
    if (!searcher.finite) std::fill_n(searcher.stretched, kMaxHeadDim, 0.0f);
  }
  float* out = item.rotated + searcher.number * dim;
  for (int64_t d = 0; d < dim; ++d) out[d] = searcher.rotated[d] * factor;
}

/** Logits of the blocks of a head's zone, in steps, by their means; queries are set one by one. */
class Blocks {
 public:
  Blocks(const SearchArgs& args, const SearchItem& item, int64_t head)
      : layout_(args.layout()),
        key_dim_(args.shape().rows.key_dim),
        logits_(args.decode.logits),
        item_(item),
        head_(head) {}

  /** A finite query, balanced, to be the one at `index`; zeros for one that is not. */
  void set(int64_t index, const float* query) {
    const float largest = largest_of(query, key_dim_);
    int16_t* quantised = query_ + index * layout_.rotated_dim;
    quantise(query, key_dim_, largest, kFineLevels, quantised);
    base_[index] = logits_.scale * (largest / kFineLevels) * kOctaveSteps;
    const int16_t* centre = item_.balance.centre + head_ * key_dim_;
    int64_t dot = 0;
    for (int64_t c = 0; c < key_dim_; ++c) dot += int32_t{quantised[c]} * int32_t{centre[c]};
    const float unit = base_[index] * item_.balance.centre_step[head_];
    centre_[index] = std::isfinite(unit) ? whole_steps(float(dot) * unit) : 0;
  }

  /** Logits of all blocks for `queries` of them, (queries, blocks). */
  void look(const Kernels& kernels, int64_t queries, int32_t* out) const {
    const int64_t of_segment = layout_.blocks();
    for (int64_t done = 0; done < item_.blocks;) {
      const int64_t number = item_.first_block + done;
      const int64_t count = std::min(of_segment - number % of_segment, item_.blocks - done);
      uint8_t* segment = item_.sequence.summaries[number / of_segment];
      kernels.mean_dots({layout_.means(segment, head_, number % of_segment), count,
                         layout_.rotated_dim, query_, queries, out + done, item_.blocks});
      const float* steps = layout_.steps(segment, head_, number % of_segment);
      for (int64_t q = 0; q < queries; ++q) {
        for (int64_t b = 0; b < count; ++b) {
          int32_t& logit = out[q * item_.blocks + done + b];
          const float step = base_[q] * steps[b];
          const int32_t own = std::isfinite(step) ? whole_steps(float(logit) * step) : 0;
          logit = joined_steps(own, centre_[q]);
        }
      }
      done += count;
    }
  }

  /** Of one query's logits. */
  BlockSums sums(const int32_t* steps) const {
    BlockSums all;
    all.most = *std::max_element(steps, steps + item_.blocks);
    for (int64_t done = 0, count; done < item_.blocks; done += count) {
      const int64_t number = item_.first_block + done;
      count = std::min(kChunkBlocks - number % kChunkBlocks, item_.blocks - done);
      all.add(BlockSums::of_chunk(steps + done, count));
    }
    return all;
  }

 private:
  const SummaryLayout& layout_;
  const int64_t key_dim_;
  const Logits& logits_;
  const SearchItem& item_;
  const int64_t head_;
  int16_t query_[Window::kQueries * kMaxRotatedDim] = {};
  float base_[Window::kQueries] = {};
  int32_t centre_[Window::kQueries] = {};  // logits of the centre, in steps
};

/** The queries of one kv head, and the scale that they share. */
void prepare_signs(const SearchArgs& args, const Kernels& kernels, const SearchItem& item,
                   int64_t head) {
  const Logits& logits = args.decode.logits;
  const int64_t dim = args.layout().rotated_dim, searchers = args.rules().searchers;
  const int64_t first = head * searchers;
  const KeyMeans keys(item.statistics, head, dim);
  // A single searcher's scores need no comparing, and the mean of a group has no window.
  const bool compared = searchers > 1;
  Window window(args.shape(), logits, item.sequence, head);
  Blocks blocks(args, item, head);
  float largest[Window::kQueries];
  for (int64_t begin = 0; begin < searchers; begin += Window::kQueries) {
    const int64_t count = std::min(Window::kQueries, searchers - begin);
    HeadScale* scales = item.scales + first + begin;
    for (int64_t i = 0; i < count; ++i) {
      Searcher searcher;
      prepare(args, kernels, item, head, begin + i, searcher);
      scales[i] = HeadScale{};
      scales[i].whole = searcher.finite;
      largest[i] = largest_of(searcher.rotated, dim);
      quantise(searcher.rotated, dim, largest[i], float(kQueryLevels),
               item.quantised + searcher.number * dim);
      if (compared && searcher.finite) window.set(i, searcher.query);
      if (item.blocks > 0) blocks.set(i, searcher.stretched);
    }
    if (compared) window.look(kernels, count);
    int32_t* steps = item.block_steps + (first + begin) * item.blocks;
    if (item.blocks > 0) blocks.look(kernels, count, steps);
    for (int64_t i = 0; i < count; ++i) {
      if (!scales[i].whole) continue;
      const float resident =
          compared ? window.log_sum_exp(i, bias_of(logits, first + begin + i)) : -INFINITY;
      const int8_t* quantised = item.quantised + (first + begin + i) * dim;
      BlockSums sums;
      if (item.blocks > 0) sums = blocks.sums(steps + i * item.blocks);
      scales[i] = head_scale(keys, item.blocks > 0 ? &sums : nullptr, quantised, dim, largest[i],
                             logits.scale, resident);
    }
  }
  item.octave[head] =
      score_lines(item.scales + first, searchers, item.slope + first, item.variance_term + first,
                  item.offset + first, item.blocks > 0 ? item.per_step + first : nullptr);
}

void prepare_votes(const SearchArgs& args, const Kernels& kernels, const SearchItem& item,
                   int64_t head, int64_t index) {
  const int64_t subspaces = args.layout().subspaces();
  Searcher searcher;
  prepare(args, kernels, item, head, index, searcher);
  uint8_t* votes = item.votes + searcher.number * subspaces * 256;
  if (!searcher.finite) {
    std::fill_n(votes, subspaces * 256, uint8_t{0});
    return;
  }
  for (int64_t b = 0; b < subspaces; ++b) {
    cast_votes(searcher.rotated + b * kSubspaceDim,
               item.statistics.counts + (head * subspaces + b) * 256, item.statistics.usable[head],
               item.plan.vote_ratio, votes + b * 256);
  }
}

}  // namespace

void ParisKVSearch::prepare_query(const SearchArgs& args) {
  // Tables of votes are long work: a task per query. Heads whose scores are compared go together.
  const int64_t heads = args.shape().kv_heads, items = int64_t(args.items.size());
  if (args.rules().scorer == Scorer::kVotes) {
    const int64_t searchers = args.rules().searchers;
    device_.pool.parallel_for(items * heads * searchers, [&](int64_t task) {
      prepare_votes(args, device_.kernels, args.items[task / searchers / heads],
                    task / searchers % heads, task % searchers);
    });
    return;
  }
  device_.pool.parallel_for(items * heads, [&](int64_t task) {
    prepare_signs(args, device_.kernels, args.items[task / heads], task % heads);
  });
}

}  // namespace pariskv::cpu
