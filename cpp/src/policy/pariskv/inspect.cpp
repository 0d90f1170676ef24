// The ParisKV policy explains its work: the path of a selection, and its summaries.
#include <algorithm>
#include <cstring>
#include <limits>

#include "policy/pariskv/codec/key_statistics.h"
#include "policy/pariskv/policy.h"

namespace pariskv {

namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/** Unpacks the key in `slot` of one head of a block of summaries. */
void unpack(const SummaryLayout& layout, uint8_t* block, int64_t head, int64_t slot,
            Summaries& out) {
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

}  // namespace

void ParisKVPolicy::explain(const DecodeArgs& args, Stream stream, Explanation& out) {
  const auto [traced, weighed] = trace(args, stream);
  const int64_t heads = out.kv_heads, group = shape_.group;
  ParisKVExplanation own;
  own.kv_heads = heads;
  own.query_heads = out.query_heads;
  out.searched = true;
  for (const HeadTrace& head : traced) {
    own.candidates = std::max(own.candidates, int64_t(head.candidates.size()));
    out.selected = std::max(out.selected, int64_t(head.selected.size()));
    own.coarse.insert(own.coarse.end(), head.scores.begin(), head.scores.end());
    if (!weighed) continue;
    own.mass.push_back(head.mass);
    own.error.push_back(head.error);
  }
  own.candidate_positions.assign(size_t(heads * own.candidates), -1);
  own.estimated.assign(size_t(out.query_heads * out.selected), kNone);
  out.positions.assign(size_t(heads * out.selected), -1);
  out.worth.assign(size_t(heads * out.selected), kNone);
  for (int64_t h = 0; h < heads; ++h) {
    const HeadTrace& head = traced[size_t(h)];
    for (size_t i = 0; i < head.candidates.size(); ++i) {
      own.candidate_positions[size_t(h * own.candidates) + i] = out.zone_begin + head.candidates[i];
    }
    for (size_t i = 0; i < head.selected.size(); ++i) {
      const size_t candidate = size_t(head.selected[i]);
      out.positions[size_t(h * out.selected) + i] = out.zone_begin + head.candidates[candidate];
      out.worth[size_t(h * out.selected) + i] = head.worth[i];
      for (int64_t g = 0; g < group; ++g) {
        // One searcher speaks for all heads under mean_query.
        const size_t searcher = head.logits.size() == 1 ? 0 : size_t(g);
        own.estimated[size_t((h * group + g) * out.selected) + i] =
            head.logits[searcher][candidate];
      }
    }
  }
  out.details = std::move(own);
}

Summaries ParisKVPolicy::summaries(const SequenceView& view) const {
  const SummaryLayout& layout = codec_.layout;
  Summaries out;
  out.kv_heads = layout.kv_heads;
  out.tokens = view.zone_tokens();
  out.zone_begin = view.zone_begin;
  out.rotated_dim = layout.rotated_dim;
  out.subspaces = layout.subspaces();
  if (out.tokens == 0) return out;
  const int64_t first = view.zone_begin / layout.tokens;
  std::vector<std::vector<uint8_t>> segments;
  for (int64_t s = first; s <= (view.zone_end - 1) / layout.tokens; ++s) {
    segments.emplace_back(static_cast<size_t>(layout.bytes()));
    memory_.fetch(segments.back().data(), view.summaries[s], layout.bytes());
  }
  for (int64_t head = 0; head < out.kv_heads; ++head) {
    for (int64_t position = view.zone_begin; position < view.zone_end; ++position) {
      uint8_t* segment = segments[size_t(position / layout.tokens - first)].data();
      unpack(layout, segment, head, position % layout.tokens, out);
    }
  }
  if (layout.block == 0) return out;
  out.block = layout.block;
  out.channels = shape_.rows.key_dim;
  const int64_t first_block = view.zone_begin / out.block;
  out.blocks = (view.zone_end - 1) / out.block + 1 - first_block;
  const Balance balance = balance_of(layout, out.channels, view[Part::kState]);
  const auto fetched = [&](const auto* from, int64_t count) {
    std::vector<std::decay_t<decltype(*from)>> to(static_cast<size_t>(count));
    memory_.fetch(to.data(), from, count * int64_t(sizeof(*from)));
    return to;
  };
  out.balance = fetched(balance.stretch, out.kv_heads * out.channels);
  const std::vector<int16_t> centre = fetched(balance.centre, out.kv_heads * out.channels);
  const std::vector<float> centre_steps = fetched(balance.centre_step, out.kv_heads);
  for (int64_t head = 0; head < out.kv_heads; ++head) {
    const int16_t* common = centre.data() + head * out.channels;
    const float common_step = centre_steps[size_t(head)];
    for (int64_t b = first_block; b < first_block + out.blocks; ++b) {
      uint8_t* segment = segments[size_t(b / layout.blocks() - first)].data();
      const int8_t* levels = layout.means(segment, head, b % layout.blocks());
      const float step = *layout.steps(segment, head, b % layout.blocks());
      for (int64_t c = 0; c < out.channels; ++c) {
        out.means.push_back(float(levels[c]) * step + float(common[c]) * common_step);
      }
    }
  }
  return out;
}

}  // namespace pariskv
