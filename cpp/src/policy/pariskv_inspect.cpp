// What the ParisKV policy shows of its work: the path of a selection, and its summaries.
#include <algorithm>
#include <cstring>
#include <limits>

#include "policy/pariskv_policy.h"

namespace pariskv {

namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/** Copies what a selection went through out of the workspace. */
void fill(Explanation& out, const SearchItem& item, int64_t top_k) {
  const int64_t heads = out.kv_heads;
  out.searched = true;
  out.coarse.assign(item.scores, item.scores + heads * out.zone_tokens);
  out.candidates = *std::max_element(item.candidate_count, item.candidate_count + heads);
  out.selected = *std::max_element(item.selected_count, item.selected_count + heads);
  out.candidate_positions.assign(size_t(heads * out.candidates), -1);
  out.positions.assign(size_t(heads * out.selected), -1);
  out.worth.assign(size_t(heads * out.selected), kNone);
  out.estimated.assign(size_t(out.query_heads * out.selected), kNone);
  out.exact.assign(size_t(out.query_heads * out.selected), kNone);
  for (int64_t head = 0; head < heads; ++head) {
    const int32_t* candidate = item.candidate + head * (item.candidates + kCollectSlack);
    for (int64_t i = 0; i < item.candidate_count[head]; ++i) {
      out.candidate_positions[size_t(head * out.candidates + i)] = out.zone_begin + candidate[i];
    }
    for (int64_t i = 0; i < item.selected_count[head]; ++i) {
      out.positions[size_t(head * out.selected + i)] = item.selected[head * top_k + i];
      out.worth[size_t(head * out.selected + i)] = item.selected_worth[head * top_k + i];
    }
  }
}

/** Estimated logits of the selected rows; one searcher speaks for all heads under mean_query. */
void fill_estimates(Explanation& out, const SearchItem& item, int64_t searchers, int64_t top_k) {
  const int64_t group = out.query_heads / out.kv_heads;
  for (int64_t query = 0; query < out.query_heads; ++query) {
    const int64_t head = query / group;
    const int64_t searcher = searchers == 1 ? head : query;
    for (int64_t i = 0; i < item.selected_count[head]; ++i) {
      const int64_t candidate = item.selected_candidate[head * top_k + i];
      out.estimated[size_t(query * out.selected + i)] =
          item.estimates[searcher * item.candidates + candidate];
    }
  }
}

}  // namespace

void ParisKvPolicy::explain(Explanation& explanation) const {
  const SearchItem& item = items_.front();
  fill(explanation, item, config_.top_k);
  fill_estimates(explanation, item, searchers(), config_.top_k);
}

Summaries ParisKvPolicy::summaries(const SequenceView& view) const {
  const SummaryLayout layout = shape_.summary();
  Summaries out;
  out.kv_heads = layout.kv_heads;
  out.tokens = view.zone_tokens();
  out.zone_begin = view.zone_begin;
  out.rotated_dim = layout.rotated_dim;
  out.subspaces = layout.subspaces();
  for (int64_t head = 0; head < out.kv_heads; ++head) {
    for (int64_t position = view.zone_begin; position < view.zone_end; ++position) {
      uint8_t* block = view.summaries[position / layout.tokens];
      const int64_t slot = position % layout.tokens;
      const uint8_t* signs = layout.signs(block, head, slot);
      const uint8_t* record = layout.records(block, head, slot);
      const uint8_t norm = *layout.norms(block, head, slot);
      const float scale =
          float_of_bits(uint32_t{*layout.scales(block, head, slot)} << kScaleShift) / 255.0f;
      out.signs.insert(out.signs.end(), signs, signs + out.subspaces);
      for (int64_t d = 0; d < out.rotated_dim; ++d) {
        uint8_t level = 0;
        for (int plane = 0; plane < 3; ++plane) {
          level |= uint8_t((record[plane * layout.plane_bytes() + d / 8] >> (d % 8) & 1) << plane);
        }
        out.magnitudes.push_back(level);
      }
      for (int64_t b = 0; b < out.subspaces; ++b) {
        out.weights.push_back(scale * float(record[layout.weights_offset() + b]));
      }
      out.norms.push_back(float(double(norm_units(norm)) * kNormUnit));
    }
  }
  return out;
}

}  // namespace pariskv
