// Candidates to rows: estimated logits from the codes, the worth of each row, the best ones.
#include <algorithm>
#include <cmath>
#include <functional>

#include "cpu/numerics.h"
#include "cpu/pariskv/search.h"
#include "cpu/softmax.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kChunk = 1024;  // candidates per task

/** Candidates of one head that lie in one segment. */
struct SegmentRun {
  int64_t segment;
  int64_t first;  // index of the first candidate
  int64_t count;
  int32_t slots[kChunk];
};

/** The run that starts at candidate `first`, its summaries on their way to the cache. */
void start_run(const SummaryLayout& layout, const SearchItem& item, int64_t head, int64_t first,
               int64_t last, SegmentRun& run) {
  const int32_t* candidate = item.candidate + head * (item.candidates() + kCollectSlack);
  const int64_t tokens = layout.tokens;
  run.first = first;
  run.count = 0;
  if (first == last) return;
  run.segment = (item.sequence.zone_begin + candidate[first]) / tokens;
  const int64_t origin = run.segment * tokens - item.sequence.zone_begin;
  while (first + run.count < last && candidate[first + run.count] < origin + tokens) {
    run.slots[run.count] = int32_t(candidate[first + run.count] - origin);
    ++run.count;
  }

  // The estimate fetches ahead as it goes, but only within its run: the first ones are fetched
  // here. More at once would be dropped.
  uint8_t* block = item.sequence.summaries[run.segment];
  for (int64_t i = 0; i < std::min(run.count, kEstimateAhead); ++i) {
    const uint8_t* record = layout.records(block, head, run.slots[i]);
    for (int64_t byte = 0; byte < layout.record_bytes(); byte += 64) {
      __builtin_prefetch(record + byte);
    }
    __builtin_prefetch(layout.signs(block, head, run.slots[i]));
    __builtin_prefetch(layout.scales(block, head, run.slots[i]));
  }
}

/** The part of a logit that a key has from its block's mean; 0 without blocks. */
float mean_logit(const SummaryLayout& layout, const SearchItem& item, int64_t query,
                 int64_t position) {
  if (item.blocks == 0) return 0;
  const int64_t block = position / layout.block - item.first_block;
  return float(item.block_steps[query * item.blocks + block]) * kLogitOfStep;
}

/** Estimated logits of candidates [first, last) of one head. */
void estimate_chunk(const SearchArgs& args, const Kernels& kernels, const SearchItem& item,
                    int64_t head, int64_t first, int64_t last) {
  const SummaryLayout layout = args.layout();
  const int64_t query = head * args.rules().searchers;
  SegmentRun runs[2];
  start_run(layout, item, head, first, last, runs[0]);
  for (int turn = 0; runs[turn].count > 0; turn ^= 1) {
    const SegmentRun& run = runs[turn];
    start_run(layout, item, head, run.first + run.count, last, runs[turn ^ 1]);
    uint8_t* block = item.sequence.summaries[run.segment];
    float* estimates = item.estimates + query * item.candidates() + run.first;
    for (int64_t i = 0; i < run.count && item.candidate_scale != nullptr; ++i) {
      item.candidate_scale[head * item.candidates() + run.first + i] =
          float_of(scale_bits(*layout.scales(block, head, run.slots[i])));
    }
    kernels.estimate({layout.signs(block, head, 0), layout.scales(block, head, 0),
                      layout.records(block, head, 0), layout.rotated_dim, run.slots, run.count,
                      args.rules().searchers, item.rotated + query * layout.rotated_dim,
                      args.rules().codec->signed_centres.data(), estimates, item.candidates()});
    if (item.blocks == 0 && args.decode.logits.softcap == 0) continue;
    for (int64_t h = 0; h < args.rules().searchers; ++h) {
      for (int64_t i = 0; i < run.count; ++i) {
        float& logit = estimates[h * item.candidates() + i];
        const int64_t position = run.segment * layout.tokens + run.slots[i];
        logit = logit + mean_logit(layout, item, query + h, position);
        logit = soft_capped(logit, args.decode.logits.softcap);
      }
    }
  }
}

/** Some keys that are no candidates, and their estimated logits for some heads. */
struct Sample {
  static constexpr int64_t kHeads = 16;
  int64_t count = 0;
  float weight = 0;  // of each: of how many keys it is one
  float logits[kHeads * kSampledKeys];
};

/**
 * What is attended to is also what is left out: a few keys say how much the others, together, would
 * get. Whatever scores as a candidate may does not count.
 */
void look_at_others(const SearchArgs& args, const Kernels& kernels, const SearchItem& item,
                    int64_t head, int64_t first, int64_t heads, Sample& sample) {
  const SummaryLayout layout = args.layout();
  const int64_t zone = item.sequence.zone_tokens(), query = head * args.rules().searchers + first;
  const uint8_t* scores = item.scores + head * zone;
  const int64_t keys = std::min(zone, kSampledKeys), step = zone / keys;
  sample.weight = float(zone) / float(keys);
  sample.count = 0;
  for (int64_t offset = step / 2, i = 0; i < keys; offset += step, ++i) {
    if (scores[offset] == 0 || scores[offset] >= item.least[head]) continue;
    const int64_t position = item.sequence.zone_begin + offset;
    const int32_t slot = int32_t(position % layout.tokens);
    uint8_t* block = item.sequence.summaries[position / layout.tokens];
    kernels.estimate({layout.signs(block, head, 0), layout.scales(block, head, 0),
                      layout.records(block, head, 0), layout.rotated_dim, &slot, 1, heads,
                      item.rotated + query * layout.rotated_dim,
                      args.rules().codec->signed_centres.data(), sample.logits + sample.count,
                      kSampledKeys});
    for (int64_t h = 0; h < heads; ++h) {
      float& logit = sample.logits[h * kSampledKeys + sample.count];
      logit = logit + mean_logit(layout, item, query + h, position);
      logit = soft_capped(logit, args.decode.logits.softcap);
    }
    ++sample.count;
  }
}

/** The log-sum-exp of some logits. */
float log_sum_exp_of(const Kernels& kernels, const float* logits, int64_t count) {
  const float top = count > 0 ? *std::max_element(logits, logits + count) : -INFINITY;
  return log_sum_exp(top, kernels.sum_exp(logits, count, top), nullptr);
}

/**
 * Worth for rows that are worth next to nothing: it rises with the logit that is nearest to its
 * head's total, and stays under kLeastWorth.
 */
void grade(const SearchArgs& args, const SearchItem& item, int64_t head, float* worth) {
  const int64_t group = args.shape().group;
  const float* totals = item.totals + head * group;
  for (int64_t i = 0; i < item.candidate_count[head]; ++i) {
    if (!(worth[i] < kLeastWorth)) continue;
    float nearest = -INFINITY;
    for (int64_t g = 0; g < group; ++g) {
      if (!std::isfinite(totals[g])) continue;
      const float logit = item.estimates[(head * group + g) * item.candidates() + i];
      nearest = std::max(nearest, logit - totals[g]);
    }
    worth[i] = kLeastWorth / (1.0f - nearest);
  }
}

/** How far estimated logits of a query are off: see kEstimateNoise. */
struct Noise {
  const float* scales;  // of the keys' weights; null: nobody asks
  float spread;         // for each unit of these
};

/**
 * Adds shares of the attention, exp(logit - all), and their squares: those that estimated logits
 * stand for on average, where it is known how far they are off.
 */
void add_shares(const Kernels& kernels, const float* logits, int64_t count, float all,
                const Noise& noise, float* sums, float* squares) {
  constexpr int64_t kSome = 512;
  float shares[kSome], raised[kSome];
  for (int64_t first = 0; first < count; first += kSome) {
    const int64_t some = std::min(count - first, kSome);
    std::fill_n(shares, some, 0.0f);
    kernels.add_exp(logits + first, some, all, shares);
    for (int64_t i = 0; i < some; ++i) sums[first + i] += shares[i];
    if (noise.scales != nullptr) {
      for (int64_t i = 0; i < some; ++i) {
        const float off = noise.spread * noise.scales[first + i];
        raised[i] = std::min(logits[first + i] + off * off, all);
      }
      std::fill_n(shares, some, 0.0f);
      kernels.add_exp(raised, some, all, shares);
    }
    for (int64_t i = 0; i < some; ++i) squares[first + i] += shares[i] * shares[i];
  }
}

/** The sum of squares of the shares of sampled keys, in units. */
uint64_t squares_of(const Kernels& kernels, const float* logits, int64_t count, float all) {
  float shares[kSampledKeys] = {};
  kernels.add_exp(logits, count, all, shares);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += square_of(shares[i] * shares[i]);
  return sum;
}

Noise noise_of(const SearchArgs& args, const SearchItem& item, int64_t head, int64_t query) {
  if (item.candidate_scale == nullptr) return {nullptr, 0};
  const int64_t dim = args.layout().rotated_dim;
  const float* rotated = item.rotated + query * dim;
  return {item.candidate_scale + head * item.candidates(),
          kEstimateNoise * std::sqrt(dot(rotated, rotated, dim))};
}

/**
 * The worth of each candidate to the group: the share of attention it would get, averaged
 * over the heads, next to the resident rows, the other candidates and all other keys.
 */
void weigh(const SearchArgs& args, const Kernels& kernels, const SearchItem& item, int64_t head) {
  const int64_t count = item.candidate_count[head];
  float* worth = item.worth + head * item.candidates();
  if (args.rules().group_rule == GroupRule::kMeanQuery) {
    std::copy_n(item.estimates + head * item.candidates(), count, worth);
    return;
  }
  std::fill_n(worth, count, 0.0f);
  float* squares = item.budget == nullptr ? nullptr : item.squares + head * item.candidates();
  if (squares != nullptr) std::fill_n(squares, count, 0.0f);
  ErrorBudget::Heads heads{0, args.shape().group, 0, 0, 0};
  Sample others;
  for (int64_t g = 0; g < args.shape().group; ++g) {
    if (g % Sample::kHeads == 0) {
      const int64_t some = std::min(args.shape().group - g, Sample::kHeads);
      look_at_others(args, kernels, item, head, g, some, others);
    }
    const int64_t query_head = head * args.shape().group + g;
    const int64_t running = item.row * args.shape().query_heads() + query_head;
    const float resident = log_sum_exp(args.running.maximum[running], args.running.sum[running],
                                       bias_of(args.decode.logits, query_head));
    const float* logits = item.estimates + query_head * item.candidates();
    const float found = log_sum_exp_of(kernels, logits, count);
    const float* sampled = others.logits + g % Sample::kHeads * kSampledKeys;
    const float other = log_sum_exp_of(kernels, sampled, others.count) + std::log(others.weight);
    const float searched = log_sum_exp(found, 1.0f, &other);
    const float all = log_sum_exp(searched, 1.0f, &resident);
    item.totals[query_head] = all;
    if (!std::isfinite(all)) continue;  // a query that is not finite does not count
    if (item.budget == nullptr) {
      kernels.add_exp(logits, count, all, worth);
      continue;
    }
    add_shares(kernels, logits, count, all, noise_of(args, item, head, query_head), worth, squares);
    if (args.rules().error > 0 || args.decode.traced) {
      heads.sampled += squares_of(kernels, sampled, others.count, all);
    }
    heads.resident += mass_of(std::exp(resident - all));
    ++heads.finite;
  }
  if (item.budget != nullptr) {
    heads.keys = others.weight;
    item.budget[head] =
        ErrorBudget::of(args.rules().error, item.tail.weight(item.sequence.zone_tokens()), heads);
    for (int64_t i = 0; i < count; ++i) squares[i] = squares[i] / float(heads.group);
  }
  int64_t least = 0;  // candidates that are worth next to nothing
  for (int64_t i = 0; i < count; ++i) {
    worth[i] = worth[i] / float(args.shape().group);
    least += worth[i] < kLeastWorth;
  }
  if (count - least < args.rules().top_k) grade(args, item, head, worth);
}

/** Larger number, then lower index, as one unsigned key that sorts the other way round. */
uint64_t sort_key(float worth, int64_t index) {
  const uint32_t bits = bits_of(worth);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{ascending} << 32 | uint32_t(~uint32_t(index));
}

/** The `wanted` largest keys of `keys`, in descending order, at its front. */
void partial_sort(uint64_t* keys, int64_t count, int64_t wanted) {
  // One look at the leading bits leaves little to sort: most candidates are worth far less
  // than the last row that is taken.
  constexpr int kShift = 52;
  int32_t histogram[1 << (64 - kShift)] = {};
  for (int64_t i = 0; i < count; ++i) ++histogram[keys[i] >> kShift];
  int64_t bucket = (1 << (64 - kShift)) - 1;
  for (int64_t seen = histogram[bucket]; seen < wanted; seen += histogram[bucket]) --bucket;
  uint64_t* end = std::partition(keys, keys + count,
                                 [&](uint64_t key) { return int64_t(key >> kShift) >= bucket; });
  std::nth_element(keys, keys + wanted - 1, end, std::greater<>());
  std::sort(keys, keys + wanted, std::greater<>());
}

/** How many of `most` rows, best first, the budget of a head asks for. */
int64_t rows_within(const SearchItem& item, int64_t head, const uint64_t* order, int64_t most) {
  const float* worth = item.worth + head * item.candidates();
  const float* squares = item.squares + head * item.candidates();
  const ErrorBudget& budget = item.budget[head];
  uint64_t reached = budget.resident, left = 0;
  for (int64_t i = 0; i < item.candidate_count[head]; ++i) left += square_of(squares[i]);
  int64_t rows = 0;
  const auto bin_of = [&](int64_t row) { return worth_bin(bits_of(worth[~uint32_t(order[row])])); };
  const auto take = [&] {
    const uint32_t index = ~uint32_t(order[rows++]);
    reached += mass_of(worth[index]);
    left -= square_of(squares[index]);
  };
  while (rows < most && left > budget.may_stay) {
    const int bin = bin_of(rows);
    do take();
    while (rows < most && (bin == 0 || bin_of(rows) == bin));
  }
  while (rows < most && rows < budget.least) take();
  item.mass[head] = reached;
  item.left[head] = left;
  return rows;
}

void take_best(const SearchArgs& args, const SearchItem& item, int64_t head) {
  const int64_t count = item.candidate_count[head];
  int64_t wanted = std::min(args.rules().top_k, count);
  const float* worth = item.worth + head * item.candidates();
  const int32_t* candidate = item.candidate + head * (item.candidates() + kCollectSlack);
  uint64_t* order = item.order + head * item.candidates();
  for (int64_t i = 0; i < count; ++i) order[i] = sort_key(worth[i], i);
  if (wanted > 0) partial_sort(order, count, wanted);
  if (item.budget != nullptr) wanted = rows_within(item, head, order, wanted);
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t index = int64_t(uint32_t(~uint32_t(order[i])));
    item.selected[head * args.rules().top_k + i] =
        int32_t(item.sequence.zone_begin + candidate[index]);
    item.selected_worth[head * args.rules().top_k + i] = worth[index];
    item.selected_candidate[head * args.rules().top_k + i] = int32_t(index);
  }
  item.selected_count[head] = wanted;
}

}  // namespace

void ParisKVSearch::rerank(const SearchArgs& args) {
  const int64_t heads = args.shape().kv_heads;
  // Cut by the most candidates of any sequence: shorter ones leave tasks with nothing to do.
  int64_t chunks = 0;
  for (int64_t i = 0; i < int64_t(args.items.size()); ++i) {
    chunks = std::max(chunks, (args.items[i].candidates() + kChunk - 1) / kChunk);
  }
  device_.pool.parallel_for(int64_t(args.items.size()) * heads * chunks, [&](int64_t task) {
    const SearchItem& item = args.items[task / chunks / heads];
    const int64_t head = task / chunks % heads;
    const int64_t first = task % chunks * kChunk;
    const int64_t last = std::min(item.candidate_count[head], first + kChunk);
    if (first < last) estimate_chunk(args, device_.kernels, item, head, first, last);
  });
  device_.pool.parallel_for(int64_t(args.items.size()) * heads, [&](int64_t task) {
    const SearchItem& item = args.items[task / heads];
    weigh(args, device_.kernels, item, task % heads);
    take_best(args, item, task % heads);
  });
}

}  // namespace pariskv::cpu
