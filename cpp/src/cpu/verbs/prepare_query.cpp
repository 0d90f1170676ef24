// The query side of a search: rotated, quantised, brought to a common scale or turned to votes.
#include <algorithm>
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/numerics.h"
#include "cpu/plain/plain.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kMaxRotated = 256;

/** Query `searcher` of a head as floats: one of the group, or the group's mean. */
void load_query(const SearchArgs& args, const Kernels& kernels, int64_t row, int64_t head,
                int64_t searcher, float* query) {
  const ModelShape& shape = args.shape();
  const int64_t first = head * shape.group;
  if (args.rules().group_rule != GroupRule::kMeanQuery) {
    kernels.to_float(element_at(args.decode.q, row, first + searcher), shape.dtype, shape.head_dim,
                     query);
    return;
  }
  float one[kMaxRotated];
  std::fill_n(query, shape.head_dim, 0.0f);
  for (int64_t g = 0; g < shape.group; ++g) {
    kernels.to_float(element_at(args.decode.q, row, first + g), shape.dtype, shape.head_dim, one);
    for (int64_t d = 0; d < shape.head_dim; ++d) query[d] = query[d] + one[d];
  }
  for (int64_t d = 0; d < shape.head_dim; ++d) query[d] = query[d] / float(shape.group);
}

/** H diag(s) q, without the 1 / sqrt; false, and all zero, when q is not finite. */
bool rotate(const SearchArgs& args, const float* query, float* rotated) {
  const ModelShape& shape = args.shape();
  bool finite = true;
  for (int64_t d = 0; d < shape.rotated_dim; ++d) {
    rotated[d] = d < shape.head_dim ? query[d] * args.rules().codec->rotation_signs[d] : 0.0f;
  }
  plain::walsh_hadamard(rotated, shape.rotated_dim);
  for (int64_t d = 0; d < shape.rotated_dim; ++d) {
    finite = finite && std::fabs(rotated[d]) < INFINITY;
  }
  if (!finite) std::fill_n(rotated, shape.rotated_dim, 0.0f);
  return finite;
}

/** Whole numbers from -kQueryLevels to kQueryLevels. */
void quantise(const float* rotated, int64_t count, int8_t* quantised) {
  float largest = 0;
  for (int64_t d = 0; d < count; ++d) largest = std::max(largest, std::fabs(rotated[d]));
  const float steps = largest > 0 ? float(kQueryLevels) / largest : 0.0f;
  // A largest element so small that the division overflows cannot rank anything either.
  const float step = std::fabs(steps) < INFINITY ? steps : 0.0f;
  for (int64_t d = 0; d < count; ++d) quantised[d] = int8_t(std::nearbyint(rotated[d] * step));
}

struct CommonScale {
  float gain, offset;
};

/**
 * Where a head's scores lie and how wide they spread, from sums over the zone that are kept
 * as keys come: mean <q, sum of norm * sign> / n, spread |q| * rms(norm). Exact until the
 * last division.
 */
CommonScale common_scale(const int8_t* query, const KeyStatistics& statistics, int64_t head,
                         int64_t rotated_dim) {
  const double usable = double(statistics.usable[head]);
  const int64_t* sums = statistics.sums + head * rotated_dim;
  int64_t dot = 0, square = 0;
  for (int64_t d = 0; d < rotated_dim; ++d) {
    dot += sums[d] * query[d];
    square += int64_t{query[d]} * query[d];
  }
  const double variance = double(square) * (double(statistics.square_units[head]) / usable);
  if (!(variance > 0)) return {0.0f, float(kScoreShift * kScoreSteps)};
  const double gain = kScoreSteps / (std::sqrt(variance) * kNormUnit);
  const double mean = double(dot) / usable * kNormUnit;
  return {float(gain), float(kScoreShift * kScoreSteps - mean * gain)};
}

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

}  // namespace

void CpuBackend::prepare_query(const SearchArgs& args) {
  const ModelShape& shape = args.shape();
  const int64_t dim = shape.rotated_dim;
  // Folded into the query once instead of into every key: 1 / sqrt of the rotation, the 255
  // steps of a weight, and the scale of a logit.
  const float factor = args.decode.logits.scale / std::sqrt(float(dim)) / 255.0f;
  pool_.parallel_for(
      int64_t(args.items.size()) * shape.kv_heads * args.rules().searchers, [&](int64_t task) {
        const int64_t searcher = task % args.rules().searchers;
        const int64_t head = task / args.rules().searchers % shape.kv_heads;
        const SearchItem& item = args.items[task / args.rules().searchers / shape.kv_heads];
        const int64_t query = head * args.rules().searchers + searcher;

        float plain_query[kMaxRotated], rotated[kMaxRotated];
        load_query(args, kernels_, item.row, head, searcher, plain_query);
        const bool finite = rotate(args, plain_query, rotated);
        for (int64_t d = 0; d < dim; ++d) item.rotated[query * dim + d] = rotated[d] * factor;

        if (args.rules().scorer == Scorer::kSignNorm) {
          int8_t* quantised = item.quantised + query * dim;
          quantise(rotated, dim, quantised);
          // A broken query scores every key the least, so that the others' scores stand.
          const CommonScale scale = finite ? common_scale(quantised, item.statistics, head, dim)
                                           : CommonScale{0.0f, 0.0f};
          item.gain[query] = scale.gain;
          item.offset[query] = scale.offset;
          return;
        }
        if (!finite) {
          std::fill_n(item.votes + query * shape.subspaces() * 256, shape.subspaces() * 256,
                      uint8_t{0});
          return;
        }
        for (int64_t b = 0; b < shape.subspaces(); ++b) {
          cast_votes(rotated + b * kSubspaceDim,
                     item.statistics.counts + (head * shape.subspaces() + b) * 256,
                     item.statistics.usable[head], item.sequence.vote_ratio,
                     item.votes + (query * shape.subspaces() + b) * 256);
        }
      });
}

}  // namespace pariskv::cpu
