// The attention that the last queries pay to the rows that a choice is made from. Whole numbers.
#include <algorithm>
#include <cmath>

#include "cpu/choice.h"
#include "cpu/rows.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kTile = 64;                        // rows of a task
constexpr int64_t kQueriesAtOnce = 64;               // heads of queries in one pass over a tile
constexpr int64_t kMostPool = 63;                    // neighbours, see HardKv::validate
constexpr int32_t kMostLogit = int32_t(kMostSteps);  // of a part of a logit, in steps
constexpr int64_t kReferenceKeys = 15;               // evenly spaced, whose median is the reference

class Observer {
 public:
  Observer(const Kernels& kernels, ThreadPool& pool, const HardKvKeep& args,
           const KeptChange& change, const Choice& choice)
      : kernels_(kernels),
        pool_(pool),
        shape_(args.shape),
        rules_(args.rules),
        change_(change),
        choice_(choice) {}

  void run() {
    pool_.parallel_for(shape_.kv_heads, [&](int64_t head) { list(head); });
    for (int64_t head = 0; head < shape_.kv_heads; ++head) observe_head(head);
  }

 private:
  /** The rows to choose from: those that are kept or held, and those that are new. */
  void list(int64_t head) {
    int32_t* positions = choice_.positions + head * choice_.width;
    uint8_t* ages = choice_.ages + head * choice_.width;
    int64_t count = 0;
    const bool fresh = change_.fresh();
    if (!fresh) {
      const KeptLayout before = shape_.kept(change_.before.kept_capacity);
      const int32_t* counts = before.counts(change_.before.kept, head);
      const int32_t* kept = before.positions(change_.before.kept, head);
      const uint8_t* kept_ages = before.ages(change_.before.kept, head);
      const int64_t attended = counts[0], all = counts[0] + counts[1];
      for (int64_t a = 0, h = attended; a < attended || h < all; ++count) {
        const bool first = h == all || (a < attended && kept[a] < kept[h]);
        const int64_t i = first ? a++ : h++;
        positions[count] = kept[i];
        ages[count] = kept_ages[i];
      }
    }
    const int64_t begin = fresh ? change_.after.zone_begin : change_.before.zone_end;
    for (int64_t position = begin; position < change_.after.zone_end; ++position) {
      positions[count] = int32_t(position);
      ages[count++] = kNewcomer;
    }
    choice_.counts[head] = count;
  }

  /** The heads of queries that have a say, side by side; returns how many there are. */
  int64_t gather(int64_t head) {
    const RecentLayout recent = shape_.recent_queries();
    int64_t queries = 0;
    positions_asked_ = 0;
    for (int64_t p = change_.queries.begin; p < change_.queries.end; ++p) {
      const int64_t slot = recent.slot_of(p), before = queries;
      if (*recent.position(change_.after.recent, slot) != p + 1) continue;
      for (int64_t g = head * shape_.group; g < (head + 1) * shape_.group; ++g) {
        const RecentScale scale = *recent.scale(change_.after.recent, slot, g);
        if (std::isnan(scale.unit)) continue;
        const int8_t* numbers = recent.numbers(change_.after.recent, slot, g);
        std::copy_n(numbers, recent.key_dim, choice_.numbers + queries * recent.key_dim);
        choice_.scales[queries] = scale;
        choice_.owner[queries++] = positions_asked_;
      }
      if (queries > before) asked_[positions_asked_++] = p;
    }
    set_offsets(queries);
    return queries;
  }

  /**
   * Channels that are loud in every key drown the others in 8 bits, and no softmax sees them: keys
   * are compared by what is left of them without a reference, the median of some, channel by
   * channel. A median, so that no single key spoils it.
   */
  void set_reference(int64_t head) {
    const int64_t dim = shape_.rows.key_dim, count = choice_.counts[head];
    const int32_t* positions = choice_.positions + head * choice_.width;
    float keys[kReferenceKeys][kMaxHeadDim];
    int64_t found = 0;
    for (int64_t s = 0; s < kReferenceKeys && count > 0; ++s) {
      float* key = keys[found];
      kernels_.to_float(row_at(shape_, change_.after, head, positions[s * count / kReferenceKeys]),
                        shape_.rows.dtype, dim, key);
      found += std::all_of(key, key + dim, [](float x) { return std::isfinite(x); });
    }
    for (int64_t d = 0; d < dim; ++d) {
      float values[kReferenceKeys];
      for (int64_t s = 0; s < found; ++s) values[s] = keys[s][d];
      std::sort(values, values + found);
      reference_[d] = found > 0 ? values[found / 2] : 0.0f;
    }
  }

  /** Logits of the reference, twice 8 bits of it: heads of a group are compared by them. */
  void set_offsets(int64_t queries) {
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
            {&row, 1, DType::kFloat32, dim, some, choice_.numbers + done * dim, dots, &exponent});
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
  void observe_head(int64_t head) {
    set_reference(head);
    const int64_t queries = gather(head), count = choice_.counts[head];
    const int64_t tiles = (count + kTile - 1) / kTile;
    choice_.heard[head] = queries > 0;
    pool_.parallel_for(tiles, [&](int64_t tile) { set_logits(head, tile, queries); });
    pool_.parallel_for(positions_asked_, [&](int64_t i) { weigh(i, count); });
    pool_.parallel_for(tiles, [&](int64_t tile) { share_out(head, tile); });
  }

  void set_logits(int64_t head, int64_t tile, int64_t queries) {
    const int64_t first = tile * kTile, count = std::min(kTile, choice_.counts[head] - first);
    const int32_t* positions = choice_.positions + head * choice_.width + first;
    const int64_t dim = shape_.rows.key_dim;
    const void* rows[kTile];
    alignas(64) float keys[kTile * kMaxHeadDim];
    for (int64_t r = 0; r < count; ++r) {
      float* key = keys + r * dim;
      kernels_.to_float(row_at(shape_, change_.after, head, positions[r]), shape_.rows.dtype, dim,
                        key);
      for (int64_t d = 0; d < dim; ++d) key[d] = key[d] - reference_[d];
      rows[r] = key;
    }
    for (int64_t i = 0; i < positions_asked_; ++i) {
      std::fill_n(choice_.logits + i * choice_.width + first, count, kNoLogit);
    }
    int32_t dots[kQueriesAtOnce * kTile];
    uint8_t exponents[kTile];
    float steps[kTile];
    int64_t done = 0;
    do {  // once without queries as well: it tells which keys are finite
      const int64_t some = std::min(kQueriesAtOnce, queries - done);
      kernels_.round_dots(
          {rows, count, DType::kFloat32, dim, some, choice_.numbers + done * dim, dots, exponents});
      for (int64_t r = 0; r < count; ++r)
        steps[r] = exponents[r] == 255 ? 0 : key_step(exponents[r]);
      for (int64_t q = 0; q < some; ++q) {
        const RecentScale& scale = choice_.scales[done + q];
        int32_t* logits = choice_.logits + choice_.owner[done + q] * choice_.width + first;
        const int32_t offset = choice_.offsets[done + q];
        // logit_steps, loop by loop: as one loop compilers make branches of it.
        float products[kTile];
        int32_t own[kTile];
        for (int64_t r = 0; r < count; ++r) {
          products[r] = float(dots[q * count + r]) * finite_unit(scale.unit * steps[r]);
        }
        for (int64_t r = 0; r < count; ++r) {
          products[r] = std::min(std::max(products[r], -kMostSteps), kMostSteps);
        }
        for (int64_t r = 0; r < count; ++r) own[r] = offset + int32_t(nearest(products[r]));
        if (scale.most < kMostLogit) {  // there is a soft cap
          for (int64_t r = 0; r < count; ++r) own[r] = std::clamp(own[r], -scale.most, scale.most);
        }
        for (int64_t r = 0; r < count; ++r) logits[r] = std::max(logits[r], own[r]);
      }
      done += some;
    } while (done < queries);
    uint8_t* usable = choice_.usable + head * choice_.width + first;
    bool all_usable = true;
    for (int64_t r = 0; r < count; ++r) {
      usable[r] = exponents[r] != 255;
      all_usable = all_usable && usable[r] != 0;
    }
    for (int64_t i = 0; i < positions_asked_; ++i) {
      if (all_usable && positions[count - 1] <= asked_[i]) continue;
      int32_t* logits = choice_.logits + i * choice_.width + first;
      for (int64_t r = 0; r < count; ++r) {
        if (usable[r] == 0 || positions[r] > asked_[i]) logits[r] = kNoLogit;
      }
    }
  }

  /** One position's logits become weights, and their sums are taken. */
  void weigh(int64_t i, int64_t count) {
    int32_t* logits = choice_.logits + i * choice_.width;
    const int32_t most = *std::max_element(logits, logits + count);
    uint64_t sum = 0, pooled = 0;
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t weight = logits[j] == kNoLogit ? 0 : weight_of(most - logits[j]);
      logits[j] = int32_t(weight);
      sum += weight;
    }
    for (int64_t first = 0; first < count; first += kTile) {
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
  void pool(const int32_t* weights, int64_t first, int64_t count, uint32_t* out) const {
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

  void share_out(int64_t head, int64_t tile) {
    const int64_t count = choice_.counts[head], first = tile * kTile;
    uint64_t shares[kTile] = {}, ranks[kTile] = {};
    const int64_t some = std::min(kTile, count - first);
    for (int64_t i = 0; i < positions_asked_; ++i) {
      const int32_t* weights = choice_.logits + i * choice_.width;
      const uint64_t* reciprocals = choice_.reciprocals + 2 * i;
      uint32_t largest[kTile];
      pool(weights, first, count, largest);
      for (int64_t r = 0; r < some; ++r) {
        shares[r] += share_of(uint32_t(weights[first + r]), reciprocals[0]);
        ranks[r] += share_of(largest[r], reciprocals[1]);
      }
    }
    std::copy_n(shares, some, choice_.shares + head * choice_.width + first);
    std::copy_n(ranks, some, choice_.ranks + head * choice_.width + first);
  }

  const Kernels& kernels_;
  ThreadPool& pool_;
  const ModelShape& shape_;
  const HardKvRules& rules_;
  const KeptChange& change_;
  const Choice& choice_;
  float reference_[kMaxHeadDim];   // of the head at hand
  int64_t asked_[kMostObservers];  // positions whose queries have a say, of the same
  int64_t positions_asked_ = 0;
};

}  // namespace

void observe(const Kernels& kernels, ThreadPool& pool, const HardKvKeep& args,
             const KeptChange& change, const Choice& choice) {
  Observer(kernels, pool, args, change, choice).run();
}

}  // namespace pariskv::cpu
