#include "mirror.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "team.h"

namespace pariskv::ggml {

namespace {

/** Cells times query heads times their dimensions from which on a step pays, see pays_from. */
constexpr int64_t kPaysFrom = 5120 * 9 * 128;
/** Of so many steps one tells its error. */
constexpr int64_t kErrorEvery = 16;

BorrowedType borrowed_type(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return BorrowedType::kFloat32;
    case GGML_TYPE_BF16:
      return BorrowedType::kBFloat16;
    case GGML_TYPE_Q8_0:
      return BorrowedType::kQ8_0;
    default:
      return BorrowedType::kFloat16;  // others are not claimed
  }
}

Config threaded(Config config, int64_t layers, int threads) {
  config.layers = layers;
  config.threads = threads;
  return config;
}

Resources resources(int threads, std::function<bool()> stops) {
  Resources lent;
  lent.executor = openmp_team(threads);
  lent.should_stop = std::move(stops);
  return lent;
}

const char* row_of(const ggml_tensor* tensor, int64_t token, int64_t head, int64_t stream) {
  return static_cast<const char*>(tensor->data) + size_t(token) * tensor->nb[1] +
         size_t(head) * tensor->nb[2] + size_t(stream) * tensor->nb[3];
}

}  // namespace

Geometry Geometry::of(const Attention& attention) {
  return {attention.q->ne[2], attention.k->ne[2], attention.k->ne[0],
          attention.v->ne[0], attention.k->type,  attention.v->type};
}

Config Geometry::config(const Settings& settings) const {
  Config config;
  config.query_heads = query_heads, config.kv_heads = kv_heads;
  config.head_dim = head_dim, config.value_dim = value_dim;
  config.dtype = DType::kFloat32;
  config.borrowed = BorrowedRows{borrowed_type(key_type), borrowed_type(value_type)};
  config.local = settings.local, config.dense_below = settings.dense_below;
  config.memory_budget = settings.memory << 20;
  ParisKV policy;
  policy.top_k = settings.top_k, policy.error = settings.error;
  policy.tail_rows = settings.tail_rows;
  policy.seed = settings.seed;
  config.policy = policy;
  return config;
}

int64_t Geometry::pays_from(const Settings& settings) const {
  if (settings.from) return *settings.from;
  // The host reads K and V of a cell for each query head; what the engine takes beside its rows,
  // and the host for handing a layer over, does not depend on their number.
  return std::max(kLeastFrom, kPaysFrom / (query_heads * (head_dim + value_dim)));
}

Mirror::Mirror(const Geometry& geometry, const Settings& settings, int64_t layers, int threads,
               std::function<bool()> stops)
    : geometry_(geometry),
      layers_(layers),
      cache_(threaded(geometry.config(settings), layers, threads),
             resources(threads, std::move(stops))) {}

void Mirror::change(const Plan& plan) {
  for (const Change& change : plan.changes) {
    const size_t slot = size_t(change.slot);
    if (sequences_.size() <= slot) sequences_.resize(slot + 1);
    switch (change.kind) {
      case Change::Kind::kAdd:
        sequences_[slot] = cache_.add();
        break;
      case Change::Kind::kFork:
        sequences_[slot] = cache_.fork(sequences_[size_t(change.source)]);
        break;
      case Change::Kind::kTruncate:
        truncate(sequences_[slot], change.keep);
        break;
      case Change::Kind::kRemove:
        cache_.remove(sequences_[slot]);
        break;
    }
  }
}

void Mirror::truncate(SequenceId sequence, int64_t keep) {
  // A step that was aborted between two layers has left the later ones with less. What they lack
  // is read with the next step, as after a prompt.
  for (int64_t layer = 0; layer < layers_; ++layer) {
    keep = std::min(keep, cache_.length(sequence, layer));
  }
  cache_.truncate({sequence}, Cut::keep({keep}));
}

RowAddresses Mirror::addresses(const Attention& attention, const Row& row, int64_t begin,
                               int64_t end) const {
  const ggml_tensor *keys = attention.key.root, *values = attention.value.root;
  RowAddresses rows;
  for (int64_t i = begin; i < end; ++i) {
    const size_t cell = size_t((*row.cells)[size_t(i)]);
    rows.keys.push_back(static_cast<const char*>(keys->data) + cell * keys->nb[1]);
    rows.values.push_back(static_cast<const char*>(values->data) + cell * values->nb[1]);
  }
  return rows;
}

void Mirror::take_in(int64_t layer, const Attention& attention, const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    const int64_t missing = row.sees - 1 - row.has;
    if (missing <= 0) continue;
    cache_.prefill_rows(layer, {row.sequence}, {missing},
                        addresses(attention, row, row.has, row.sees - 1));
  }
}

void Mirror::attend_rows(int64_t layer, const Attention& attention, const std::vector<Row>& rows,
                         bool appends, ggml_tensor* out) {
  if (rows.empty()) return;
  const int64_t heads = geometry_.query_heads, dim = geometry_.head_dim, wide = geometry_.value_dim;
  const int64_t count = int64_t(rows.size());
  queries_.resize(size_t(count * heads * dim));
  outputs_.resize(size_t(count * heads * wide));
  std::vector<SequenceId> sequences;
  RowAddresses own;
  for (int64_t i = 0; i < count; ++i) {
    const Row& row = rows[size_t(i)];
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(queries_.data() + (i * heads + h) * dim,
                  row_of(attention.q, row.token, h, row.stream), size_t(dim) * sizeof(float));
    }
    sequences.push_back(row.sequence);
    if (!appends) continue;
    const RowAddresses last = addresses(attention, row, row.sees - 1, row.sees);
    own.keys.push_back(last.keys[0]), own.values.push_back(last.values[0]);
  }
  AttendOptions options;
  options.scale = attention.scale, options.softcap = attention.softcap;
  if (attention.sinks != nullptr) {
    options.sink_bias = TensorView::contiguous(attention.sinks->data, DType::kFloat32, {heads});
  }
  const TensorView q =
      TensorView::contiguous(queries_.data(), DType::kFloat32, {count, heads, dim});
  const TensorView outputs =
      TensorView::contiguous(outputs_.data(), DType::kFloat32, {count, heads, wide});
  // The engine keeps the mean of what it is asked for; a few steps are enough for one.
  if (rows[0].sees % kErrorEvery == 0) {
    errors_.resize(size_t(count * geometry_.kv_heads));
    options.error =
        TensorView::contiguous(errors_.data(), DType::kFloat32, {count, geometry_.kv_heads});
  }
  if (appends) {
    cache_.decode_rows(layer, sequences, q, own, outputs, options);
  } else {
    cache_.decode(layer, sequences, q, outputs, options);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Row& row = rows[size_t(i)];
    // Of the result heads come before tokens.
    char* to = static_cast<char*>(out->data) + size_t(row.token) * out->nb[2] +
               size_t(row.stream) * out->nb[3];
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(to + size_t(h) * out->nb[1], outputs_.data() + (i * heads + h) * wide,
                  size_t(wide) * sizeof(float));
    }
  }
}

bool Mirror::attend(int64_t layer, const Attention& attention, const Plan& plan,
                    const Ledger& ledger, ggml_tensor* out) {
  // Tokens of one sequence attend one after the other, those of different ones together.
  std::vector<int64_t> left;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const Seen& seen = plan.rows[i];
    if (cache_.length(sequences_[size_t(seen.slot)], layer) > seen.tokens) return false;
    left.push_back(int64_t(i));
  }
  while (!left.empty()) {
    std::vector<Row> adding, still;
    std::vector<int64_t> later;
    std::vector<bool> taken(sequences_.size());
    for (const int64_t i : left) {
      const Seen& seen = plan.rows[size_t(i)];
      if (taken[size_t(seen.slot)]) {
        later.push_back(i);
        continue;
      }
      taken[size_t(seen.slot)] = true;
      const SequenceId sequence = sequences_[size_t(seen.slot)];
      const Row row{i % attention.tokens(),
                    i / attention.tokens(),
                    sequence,
                    cache_.length(sequence, layer),
                    seen.tokens,
                    &ledger.cells_of(seen.slot)};
      (row.has < row.sees ? adding : still).push_back(row);
    }
    take_in(layer, attention, adding);
    attend_rows(layer, attention, adding, true, out);
    attend_rows(layer, attention, still, false, out);
    left = std::move(later);
  }
  return true;
}

}  // namespace pariskv::ggml
