// HARD-KV's choice of the rows that are kept: observe, choose, copy. Whole numbers throughout.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/hardkv_step.h"
#include "cpu/rows.h"
#include "observe.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kTile = 64;           // rows of a task
constexpr int64_t kQueriesAtOnce = 64;  // heads of queries in one pass over a tile
constexpr int64_t kMostPool = 63;       // neighbours, see HardKv::validate
constexpr uint8_t kNewcomer = 255;      // the age of a row that was not kept before

/** Rows that a choice is made from, at most, per kv head. */
int64_t most_rows(const KeptChange& change) {
  const int64_t zone = change.after.zone_tokens();
  if (change.cut() || change.fresh()) return change.cut() ? 0 : zone;
  const int64_t added = change.after.zone_end - change.before.zone_end;
  return std::min(zone, change.before.kept_capacity + added);
}

/** The arrays of a choice, cut from scratch. Those of queries and logits are one head's. */
struct Choice {
  int64_t width;          // rows per head, at most
  int16_t* numbers;       // (queries, key_dim) of the heads of queries that have a say
  RecentScale* scales;    // (queries)
  int64_t* owner;         // (queries) number of the position that each is of
  int32_t* logits;        // (positions, width) in steps, the largest of the group; then weights
  uint64_t* reciprocals;  // (positions, 2) of the weights' sum, and of the pooled ones'
  int32_t* positions;     // (heads, width) of the rows, ascending
  uint8_t* ages;          // (heads, width) of rows that were kept, see kept.h; kNewcomer
  uint8_t* usable;        // (heads, width) the key is finite
  uint64_t* shares;       // (heads, width) of the attention, summed over positions
  uint64_t* ranks;        // (heads, width) the metric, the same way; 0 without a say
  int64_t* counts;        // (heads) rows
  uint8_t* heard;         // (heads) some query had a say

  static Choice cut(const ModelShape& shape, int64_t width, Cutter& cutter) {
    const int64_t heads = shape.kv_heads, queries = shape.recent * shape.group;
    Choice out{};
    out.width = width;
    out.numbers = cutter.take<int16_t>(queries * shape.rows.key_dim);
    out.scales = cutter.take<RecentScale>(queries);
    out.owner = cutter.take<int64_t>(queries);
    out.logits = cutter.take<int32_t>(shape.recent * width);
    out.reciprocals = cutter.take<uint64_t>(shape.recent * 2);
    out.positions = cutter.take<int32_t>(heads * width);
    out.ages = cutter.take<uint8_t>(heads * width);
    out.usable = cutter.take<uint8_t>(heads * width);
    out.shares = cutter.take<uint64_t>(heads * width);
    out.ranks = cutter.take<uint64_t>(heads * width);
    out.counts = cutter.take<int64_t>(heads);
    out.heard = cutter.take<uint8_t>(heads);
    return out;
  }
};

/** One change of what is kept, on its way through the steps of a choice. */
class Chooser {
 public:
  Chooser(const Kernels& kernels, ThreadPool& pool, const HardKvKeep& args,
          const KeptChange& change, const Choice& choice)
      : kernels_(kernels),
        pool_(pool),
        shape_(args.shape),
        rules_(args.rules),
        change_(change),
        before_(shape_.kept(change.before.kept_capacity)),
        after_(shape_.kept(change.after.kept_capacity)),
        choice_(choice) {}

  void run() {
    pool_.parallel_for(shape_.kv_heads, [&](int64_t head) { list(head); });
    for (int64_t head = 0; head < shape_.kv_heads; ++head) observe(head);
    pool_.parallel_for(shape_.kv_heads, [&](int64_t head) { choose(head); });
  }

 private:
  /** The rows to choose from: those that are kept or held, and those that are new. */
  void list(int64_t head) {
    int32_t* positions = choice_.positions + head * choice_.width;
    uint8_t* ages = choice_.ages + head * choice_.width;
    int64_t count = 0;
    const bool fresh = change_.fresh();
    if (!fresh) {
      const int32_t* counts = before_.counts(change_.before.kept, head);
      const int32_t* kept = before_.positions(change_.before.kept, head);
      const uint8_t* kept_ages = before_.ages(change_.before.kept, head);
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
    return queries;
  }

  /** The shares and the ranks of a head's rows. */
  void observe(int64_t head) {
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
    const void* rows[kTile];
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = row_at(shape_, change_.after, head, positions[r]);
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
      kernels_.round_dots({rows, count, shape_.rows.dtype, shape_.rows.key_dim, some,
                           choice_.numbers + done * shape_.rows.key_dim, dots, exponents});
      for (int64_t r = 0; r < count; ++r)
        steps[r] = exponents[r] == 255 ? 0 : key_step(exponents[r]);
      for (int64_t q = 0; q < some; ++q) {
        const RecentScale& scale = choice_.scales[done + q];
        int32_t* logits = choice_.logits + choice_.owner[done + q] * choice_.width + first;
        for (int64_t r = 0; r < count; ++r) {
          const float unit = finite_unit(scale.unit * steps[r]);
          const int32_t logit = logit_steps(dots[q * count + r], unit, scale.most);
          logits[r] = std::max(logits[r], logit);
        }
      }
      done += some;
    } while (done < queries);
    uint8_t* usable = choice_.usable + head * choice_.width + first;
    for (int64_t r = 0; r < count; ++r) usable[r] = exponents[r] != 255;
    for (int64_t i = 0; i < positions_asked_; ++i) {
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

  /** How many rows a head keeps, which ones, and their copies. */
  void choose(int64_t head) {
    const int64_t count = choice_.counts[head];
    uint64_t* shares = choice_.shares + head * choice_.width;
    uint64_t* ranks = choice_.ranks + head * choice_.width;
    uint8_t* usable = choice_.usable + head * choice_.width;
    // The rank, then the lower row, in one number; without a say the latest rows are kept.
    constexpr uint64_t kRows = uint64_t{kMostTokens} - 1;
    const bool heard = choice_.heard[head] != 0;
    int64_t candidates = 0;
    for (int64_t j = 0; j < count; ++j) {
      if (usable[j] == 0) continue;
      ranks[candidates++] = heard ? ranks[j] << 23 | (kRows - uint64_t(j)) : uint64_t(j);
    }
    int64_t keep = rules_.most;
    if (heard && rules_.p != 1 << kTopPBits) {
      keep = top_p_count(shares, count, rules_.p, rules_.most);
    }
    keep = std::min(std::max(keep, rules_.least), candidates);
    if (keep < candidates) {
      std::nth_element(ranks, ranks + keep, ranks + candidates, std::greater<uint64_t>());
    }
    constexpr uint8_t kChosen = 2;
    for (int64_t i = 0; i < keep; ++i) {
      usable[heard ? kRows - (ranks[i] & kRows) : ranks[i]] = kChosen;
    }
    fill(head, usable, kChosen);
  }

  /** The chosen rows, then those that lost too few choices to be forgotten. */
  void fill(int64_t head, const uint8_t* usable, uint8_t chosen) {
    char* block = change_.after.kept;
    const int32_t* positions = choice_.positions + head * choice_.width;
    const uint8_t* ages = choice_.ages + head * choice_.width;
    int64_t filled = 0;
    const auto add = [&](int64_t j, uint8_t age) {
      after_.positions(block, head)[filled] = positions[j];
      after_.ages(block, head)[filled] = age;
      std::memcpy(after_.row(block, head, filled++),
                  row_at(shape_, change_.after, head, positions[j]), size_t(after_.row_bytes));
    };
    for (int64_t j = 0; j < choice_.counts[head]; ++j) {
      if (usable[j] == chosen) add(j, 0);
    }
    after_.counts(block, head)[0] = int32_t(filled);
    for (int64_t j = 0; j < choice_.counts[head]; ++j) {
      const bool held = usable[j] == 1 && ages[j] != kNewcomer && ages[j] < rules_.patience;
      if (held) add(j, uint8_t(ages[j] + 1));
    }
    after_.counts(block, head)[1] = int32_t(filled) - after_.counts(block, head)[0];
  }

  const Kernels& kernels_;
  ThreadPool& pool_;
  const ModelShape& shape_;
  const HardKvRules& rules_;
  const KeptChange& change_;
  const KeptLayout before_, after_;
  const Choice& choice_;
  int64_t asked_[kMostObservers];  // positions whose queries have a say, of the head at hand
  int64_t positions_asked_ = 0;
};

/** What is left of a head's rows in a zone that was cut. */
void trim(const ModelShape& shape, const KeptChange& change, int64_t head) {
  const KeptLayout before = shape.kept(change.before.kept_capacity);
  const KeptLayout after = shape.kept(change.after.kept_capacity);
  char *from = change.before.kept, *to = change.after.kept;
  const int32_t* counts = before.counts(from, head);
  int64_t filled = 0;
  int32_t* left = after.counts(to, head);
  left[0] = left[1] = 0;
  for (int64_t i = 0; i < counts[0] + counts[1]; ++i) {
    const int32_t position = before.positions(from, head)[i];
    if (position >= change.after.zone_end) continue;
    after.positions(to, head)[filled] = position;
    after.ages(to, head)[filled] = before.ages(from, head)[i];
    std::memcpy(after.row(to, head, filled++), before.row(from, head, i), size_t(after.row_bytes));
    ++left[i < counts[0] ? 0 : 1];
  }
}

}  // namespace

int64_t HardKvStep::scratch_bytes(const HardKvKeep& args) const {
  int64_t width = 0;
  for (int64_t i = 0; i < args.batch; ++i) width = std::max(width, most_rows(args.changes[i]));
  Cutter measure(nullptr);
  Choice::cut(args.shape, width, measure);
  return measure.bytes();
}

void HardKvStep::keep_up(const HardKvKeep& args) {
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (change.cut()) {
      pool_.parallel_for(args.shape.kv_heads,
                         [&](int64_t head) { trim(args.shape, change, head); });
      continue;
    }
    Cutter cutter(scratch_.as<char>());
    const Choice choice = Choice::cut(args.shape, most_rows(change), cutter);
    Chooser(kernels_, pool_, args, change, choice).run();
  }
}

void HardKvStep::search(const DecodeArgs& args, const HardKvRules&, const Running& running) {
  std::fill_n(running.selection.count, args.batch * args.shape.kv_heads, 0);
}

Trace HardKvStep::trace(const DecodeArgs& args, const HardKvRules&) const {
  const SequenceView& sequence = args.sequences[0];
  const KeptLayout layout = args.shape.kept(sequence.kept_capacity);
  HardKvTrace trace;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int32_t* counts = layout.counts(sequence.kept, head);
    const int32_t* positions = layout.positions(sequence.kept, head);
    trace.kept.emplace_back(positions, positions + counts[0]);
    trace.held.emplace_back(positions + counts[0], positions + counts[0] + counts[1]);
  }
  return trace;
}

}  // namespace pariskv::cpu
