// The attention that the last queries pay to the rows that a choice is made from. Whole numbers.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/kept/observer.h"
#include "cpu/rows.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kMostPool = 63;       // neighbours, see HardKV::validate
constexpr int64_t kReferenceKeys = 15;  // evenly spaced, whose median is the reference

}  // namespace

void Observer::run() {
  pool_.parallel_for(shape_.kv_heads, [&](int64_t head) { list(head); });
  for (int64_t head = 0; head < shape_.kv_heads; ++head) observe_head(head);
}
/** The rows to choose from: those that are kept or held, and those that are new. */
void Observer::list(int64_t head) {
  int32_t* positions = choice_.positions + head * choice_.width;
  int32_t* sources = choice_.sources + head * choice_.width;
  uint8_t* ages = choice_.ages + head * choice_.width;
  int64_t count = 0;
  if (rules_.filter.wanted > 0) return;  // once pages are found
  const bool fresh = rules_.fresh(change_);
  if (!fresh) {
    const KeptLayout before = shape_.kept(change_.before.kept_capacity);
    const int32_t* counts = before.counts(change_.before[Part::kKept], head);
    const int32_t* kept = before.positions(change_.before[Part::kKept], head);
    const uint8_t* kept_ages = before.ages(change_.before[Part::kKept], head);
    const int64_t attended = counts[0], all = counts[0] + counts[1];
    for (int64_t a = 0, h = attended; a < attended || h < all; ++count) {
      const bool first = h == all || (a < attended && kept[a] < kept[h]);
      const int64_t i = first ? a++ : h++;
      positions[count] = kept[i];
      sources[count] = int32_t(i);
      ages[count] = kept_ages[i];
    }
  }
  const int64_t begin = fresh ? change_.after.zone_begin : change_.before.zone_end;
  for (int64_t position = begin; position < change_.after.zone_end; ++position) {
    positions[count] = int32_t(position);
    sources[count] = kStored;
    ages[count++] = kNewcomer;
  }
  choice_.counts[head] = count;
}

/** The heads of queries that have a say, side by side, asker by asker. */
void Observer::gather(int64_t head) {
  askers_ = queries_ = 0;
  const int64_t first = head * shape_.group, last = first + shape_.group;
  if (!rules_.each_head) return gather(first, last);
  for (int64_t g = first; g < last; ++g) {
    choice_.first_asker[g - first] = askers_;
    gather(g, g + 1);
  }
  choice_.first_asker[shape_.group] = askers_;
}

/** The queries of heads [first, last): at each position they are one asker. */
void Observer::gather(int64_t first, int64_t last) {
  const RecentLayout recent = shape_.recent_queries();
  for (int64_t p = change_.queries.begin; p < change_.queries.end; ++p) {
    const int64_t slot = recent.slot_of(p), before = queries_;
    if (*recent.position(change_.after[Part::kRecent], slot) != p + 1) continue;
    for (int64_t g = first; g < last; ++g) {
      const RecentScale scale = *recent.scale(change_.after[Part::kRecent], slot, g);
      if (std::isnan(scale.unit)) continue;
      const int8_t* numbers = recent.numbers(change_.after[Part::kRecent], slot, g);
      std::copy_n(numbers, recent.key_dim, choice_.numbers + queries_ * recent.key_dim);
      choice_.scales[queries_] = scale;
      choice_.owner[queries_++] = askers_;
    }
    if (queries_ == before) continue;
    choice_.first_query[askers_] = before;
    choice_.asked[askers_++] = p;
  }
  choice_.first_query[askers_] = queries_;
}

/**
 * Channels that are loud in every key drown the others in 8 bits, and no softmax sees them: keys
 * are compared by what is left of them without a reference, the median of some, channel by
 * channel. A median, so that no single key spoils it.
 */
void Observer::set_reference(int64_t head) {
  const bool all = rules_.filter.wanted > 0;  // of the zone, before rows to look at are listed
  const int64_t begin = change_.after.zone_begin;
  const int64_t count = all ? change_.after.zone_tokens() : choice_.counts[head];
  const int64_t dim = shape_.rows.key_dim;
  float keys[kReferenceKeys][kMaxHeadDim];
  int64_t found = 0;
  for (int64_t s = 0; s < kReferenceKeys && count > 0; ++s) {
    float* key = keys[found];
    const int64_t i = s * count / kReferenceKeys;
    const RowPlace from = all ? plain_row_at(shape_, change_.after, head, begin + i) : row(head, i);
    read_key(kernels_, shape_.rows, from.key, key);
    found += std::all_of(key, key + dim, [](float x) { return std::isfinite(x); });
  }
  for (int64_t d = 0; d < dim; ++d) {
    float values[kReferenceKeys + 1];  // one more for GCC 13, which warns of std::sort
    for (int64_t s = 0; s < found; ++s) values[s] = keys[s][d];
    std::sort(values, values + found);
    reference_[d] = found > 0 ? values[found / 2] : 0.0f;
  }
}

/** Logits of the reference, twice 8 bits of it: heads of a group are compared by them. */
void Observer::set_offsets(int64_t queries) {
  const int64_t dim = shape_.rows.key_dim;
  float rest[kMaxHeadDim];
  std::copy_n(reference_, dim, rest);
  std::fill_n(choice_.offsets, queries, 0);
  for (int part = 0; part < 2; ++part) {
    const void* row = rest;
    uint8_t exponent = 0;
    int32_t dots[kQueriesAtOnce];
    for (int64_t done = 0; done < queries; done += kQueriesAtOnce) {
      const int64_t some = std::min(kQueriesAtOnce, queries - done);
      kernels_.round_dots(
          {&row, 1, RowType::kFloat32, dim, some, choice_.numbers + done * dim, dots, &exponent});
      for (int64_t q = 0; q < some; ++q) {
        const float unit = finite_unit(choice_.scales[done + q].unit * key_step(exponent));
        choice_.offsets[done + q] += logit_steps(dots[q], unit, kMostLogit);
      }
    }
    if (queries == 0) return;
    const float step = key_step(exponent);
    for (int64_t d = 0; d < dim; ++d) {
      rest[d] -= std::clamp(nearest(rest[d] / step), -kByteLevels, kByteLevels) * step;
    }
  }
}

/** The shares and the ranks of a head's rows. */
void Observer::observe_head(int64_t head) {
  set_reference(head);
  gather(head);
  set_offsets(queries_);
  choice_.has_queries[head] = askers_ > 0;
  choice_.compared[head] = choice_.agreed[head] = 0;
  if (rules_.filter.wanted > 0) {
    list_pages(head);
    look(head, [&](int64_t tile, const Askers& some) { set_page_logits(head, tile, some); });
    take_best(choice_, head, rules_.filter.wanted, uint64_t(shape_.group));
    list_rows_of_pages(head);
  }
  if (rules_.top > 0) compare(head, (choice_.counts[head] + kTile - 1) / kTile);
  look(head, [&](int64_t tile, const Askers& some) { set_logits(head, tile, some, 0); });
}

template <typename SetLogits>
void Observer::look(int64_t head, SetLogits set_logits) {
  const int64_t count = choice_.counts[head], tiles = (count + kTile - 1) / kTile;
  std::fill_n(choice_.shares + head * choice_.width, count, 0);
  std::fill_n(choice_.ranks + head * choice_.width, count, 0);
  Askers some{0, 0};
  do {  // once without askers as well: it tells which keys are finite
    some = {some.end, std::min(some.end + Choice::kAskersAtOnce, askers_)};
    const int64_t asking = some.end - some.begin;
    pool_.parallel_for(tiles, [&](int64_t tile) { set_logits(tile, some); });
    pool_.parallel_for(asking, [&](int64_t i) { weigh(i, count); });
    pool_.parallel_for(tiles, [&](int64_t tile) { share_out(head, tile, asking); });
  } while (some.end < askers_);
}

/** How far the first and the last query of each query head agree on its best rows. */
void Observer::compare(int64_t head, int64_t tiles) {
  PKV_ASSERT(rules_.each_head);
  for (int64_t g = 0; g < shape_.group; ++g) {
    const int64_t first = choice_.first_asker[g], last = choice_.first_asker[g + 1] - 1;
    if (first > last) continue;
    pool_.parallel_for(tiles, [&](int64_t tile) {
      set_logits(head, tile, {first, first + 1}, 0);
      set_logits(head, tile, {last, last + 1}, 1);
    });
    uint64_t* best[2] = {choice_.shares + head * choice_.width,
                         choice_.ranks + head * choice_.width};
    int64_t found[2];
    pool_.parallel_for(2, [&](int64_t i) { found[i] = best_of(head, i, best[i]); });
    int64_t agreed = 0;
    for (int64_t i = 0, j = 0; i < found[0] && j < found[1];) {
      const uint64_t one = best[0][i], other = best[1][j];
      agreed += one == other;
      i += one <= other;
      j += other <= one;
    }
    choice_.agreed[head] += agreed;
    ++choice_.compared[head];
  }
}

/** The rows of an asker's `top` largest logits, ascending, ties to the lower; how many. */
int64_t Observer::best_of(int64_t head, int64_t asker, uint64_t* best) const {
  constexpr int kRowBits = 32;
  const int32_t* logits = choice_.logits + asker * choice_.width;
  int64_t count = 0;
  for (int64_t j = 0; j < choice_.counts[head]; ++j) {
    if (logits[j] == kNoLogit) continue;
    best[count++] = uint64_t(kMostLogit * 4 - logits[j]) << kRowBits | uint64_t(j);
  }
  if (count > rules_.top) std::nth_element(best, best + rules_.top, best + count);
  count = std::min(count, rules_.top);
  for (int64_t i = 0; i < count; ++i) best[i] &= (uint64_t{1} << kRowBits) - 1;
  std::sort(best, best + count);
  return count;
}

/** Logits of a tile of rows, of some askers, to the arrays from number `at` on. */
void Observer::set_logits(int64_t head, int64_t tile, const Askers& askers, int64_t at) {
  const int64_t first = tile * kTile, count = std::min(kTile, choice_.counts[head] - first);
  const int64_t dim = shape_.rows.key_dim;
  const void* rows[kTile];
  alignas(64) float keys[kTile * kMaxHeadDim];
  for (int64_t r = 0; r < count; ++r) {
    float* key = keys + r * dim;
    read_key(kernels_, shape_.rows, row(head, first + r).key, key);
    for (int64_t d = 0; d < dim; ++d) key[d] = key[d] - reference_[d];
    rows[r] = key;
  }
  for (int64_t i = askers.begin; i < askers.end; ++i) {
    std::fill_n(logits_of(at + i - askers.begin, first), count, kNoLogit);
  }
  int32_t dots[kQueriesAtOnce * kTile];
  uint8_t exponents[kTile];
  float steps[kTile];
  const bool any = askers.begin < askers.end;
  const int64_t end = any ? choice_.first_query[askers.end] : 0;
  int64_t done = any ? choice_.first_query[askers.begin] : 0;
  do {
    const int64_t some = std::min(kQueriesAtOnce, end - done);
    kernels_.round_dots(
        {rows, count, RowType::kFloat32, dim, some, choice_.numbers + done * dim, dots, exponents});
    for (int64_t r = 0; r < count; ++r) steps[r] = exponents[r] == 255 ? 0 : key_step(exponents[r]);
    for (int64_t q = 0; q < some; ++q) {
      const RecentScale& scale = choice_.scales[done + q];
      int32_t* logits = logits_of(at + choice_.owner[done + q] - askers.begin, first);
      kernels_.step_logits({dots + q * count, steps, count, scale.unit, choice_.offsets[done + q],
                            scale.most < kMostLogit ? scale.most : kNoCap, logits});
    }
    done += some;
  } while (done < end);
  hide(head, tile, askers, at, exponents);
}

/** Notes which rows of a tile are usable; others have no logits, nor have those that come later. */
void Observer::hide(int64_t head, int64_t tile, const Askers& askers, int64_t at,
                    const uint8_t* exponents) const {
  const int64_t first = tile * kTile, count = std::min(kTile, choice_.counts[head] - first);
  const int32_t* positions = choice_.positions + head * choice_.width + first;
  uint8_t* usable = choice_.usable + head * choice_.width + first;
  bool all_usable = true;
  for (int64_t r = 0; r < count; ++r) {
    usable[r] = exponents[r] != 255;
    all_usable = all_usable && usable[r] != 0;
  }
  for (int64_t i = askers.begin; i < askers.end; ++i) {
    if (all_usable && positions[count - 1] <= choice_.asked[i]) continue;
    int32_t* logits = logits_of(at + i - askers.begin, first);
    for (int64_t r = 0; r < count; ++r) {
      if (usable[r] == 0 || positions[r] > choice_.asked[i]) logits[r] = kNoLogit;
    }
  }
}

/** One asker's logits become weights, and their sums are taken. */
void Observer::weigh(int64_t i, int64_t count) {
  int32_t* logits = choice_.logits + i * choice_.width;
  const int32_t most = *std::max_element(logits, logits + count);
  uint64_t sum = 0, pooled = 0;
  if (most == kNoLogit) std::fill_n(logits, count, 0);  // it sees none of them
  if (most > kNoLogit) sum = kernels_.weigh(logits, count, most, kWeights.data());
  for (int64_t first = 0; first < count && rules_.pool > 1; first += kTile) {
    uint32_t largest[kTile];
    pool(logits, first, count, largest);
    const int64_t some = std::min(kTile, count - first);
    for (int64_t r = 0; r < some; ++r) pooled += largest[r];
  }
  choice_.reciprocals[2 * i] = reciprocal_of(sum);
  choice_.reciprocals[2 * i + 1] = reciprocal_of(pooled);
}

/**
 * The largest weight of each row of a tile and its neighbours, among the rows to choose from.
 */
void Observer::pool(const int32_t* weights, int64_t first, int64_t count, uint32_t* out) const {
  const int64_t some = std::min(kTile, count - first), reach = rules_.pool / 2;
  int32_t near[kTile + kMostPool] = {};  // weights are not negative: none is no weight
  const int64_t begin = std::max<int64_t>(first - reach, 0);
  const int64_t end = std::min(first + some + reach, count);
  std::copy(weights + begin, weights + end, near + (begin - first + reach));
  int32_t largest[kTile] = {};
  for (int64_t offset = 0; offset < rules_.pool; ++offset) {
    for (int64_t r = 0; r < kTile; ++r) largest[r] = std::max(largest[r], near[r + offset]);
  }
  std::copy_n(largest, some, out);
}

void Observer::share_out(int64_t head, int64_t tile, int64_t asking) {
  const int64_t count = choice_.counts[head], first = tile * kTile;
  const int64_t some = std::min(kTile, count - first);
  uint64_t* shares = choice_.shares + head * choice_.width + first;
  uint64_t* ranks = choice_.ranks + head * choice_.width + first;
  for (int64_t i = 0; i < asking; ++i) {
    const int32_t* weights = choice_.logits + i * choice_.width;
    const uint64_t* reciprocals = choice_.reciprocals + 2 * i;
    kernels_.add_shares(weights + first, some, reciprocals[0], shares);
    if (rules_.pool == 1) continue;
    uint32_t largest[kTile];
    pool(weights, first, count, largest);
    for (int64_t r = 0; r < some; ++r) ranks[r] += share_of(largest[r], reciprocals[1]);
  }
  if (rules_.pool == 1) std::copy_n(shares, some, ranks);
}

void observe(const Kernels& kernels, ThreadPool& pool, const ModelShape& shape,
             const ObserveRules& rules, const KeptChange& change, const Choice& choice) {
  Observer(kernels, pool, shape, rules, change, choice).run();
}

}  // namespace pariskv::cpu
