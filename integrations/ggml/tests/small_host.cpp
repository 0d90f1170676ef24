#include "small_host.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>

namespace pariskv::ggml {

namespace {

std::string logged;

const float* parameters_of(const ggml_tensor* node) {
  return reinterpret_cast<const float*>(node->op_params);
}

}  // namespace

void SmallHost::load() {
  static const bool loaded = [] {
    ggml_log_set([](ggml_log_level, const char* text, void*) { logged += text; }, nullptr);
    return ggml_backend_load(PARISKV_TEST_CPU) != nullptr &&
           ggml_backend_load(PARISKV_TEST_PLUGIN) != nullptr;
  }();
  if (!loaded) throw std::runtime_error("a backend did not load: " + logged);
}

std::string SmallHost::log() {
  std::string text;
  text.swap(logged);
  return text;
}

SmallHost::SmallHost(const Shape& shape, uint32_t seed) : shape_(shape), random_(seed) {
  load();
  cpu_ = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  ours_ = ggml_backend_init_by_name("ParisKV", nullptr);
  auto* set_abort =
      reinterpret_cast<ggml_backend_set_abort_callback_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_reg_by_name("ParisKV"), "ggml_backend_set_abort_callback"));
  const auto stops = [](void* left) {
    auto* questions = static_cast<int64_t*>(left);
    return *questions >= 0 && (*questions)-- == 0;
  };
  set_abort(ours_, stops, &questions_);
  ggml_backend_t all[] = {ours_, cpu_};
  scheduler_ = ggml_backend_sched_new(all, nullptr, 2, 2048, false, false);
  kept_ = ggml_init({ggml_tensor_overhead() * size_t(4 * shape.layers + 4), nullptr, true});
  for (int layer = 0; layer < int(shape.layers); ++layer) {
    Layer own{};
    own.k = ggml_new_tensor_3d(kept_, shape.key, shape.key_dim * shape.kv_heads, shape.cells,
                               shape.streams);
    own.v = ggml_new_tensor_3d(kept_, shape.value, shape.value_dim * shape.kv_heads, shape.cells,
                               shape.streams);
    char name[64];
    std::snprintf(name, sizeof name, shape.key_name, layer);
    ggml_set_name(own.k, name);
    ggml_format_name(own.v, "cache_v_l%d", layer);
    layers_.push_back(own);
  }
  buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(kept_, ggml_backend_cpu_buffer_type());
  ggml_backend_buffer_clear(buffer_, 0);
}

SmallHost::~SmallHost() {
  ggml_backend_sched_free(scheduler_);
  ggml_backend_free(ours_);
  ggml_backend_free(cpu_);
  ggml_backend_buffer_free(buffer_);
  if (context_ != nullptr) ggml_free(context_);
  ggml_free(kept_);
}

std::vector<float> SmallHost::numbers(int64_t count, float all) {
  std::vector<float> made(static_cast<size_t>(count), all);
  std::normal_distribution<float> normal;
  for (float& number : made) number = all == 0 ? normal(random_) : all;
  return made;
}

std::vector<float> SmallHost::fill(ggml_tensor* tensor, float all) {
  if (tensor == nullptr) return {};
  std::vector<float> made = numbers(ggml_nelements(tensor), all);
  ggml_backend_tensor_set(tensor, made.data(), 0, ggml_nbytes(tensor));
  return made;
}

void SmallHost::build(int64_t tokens, int64_t first_stream, int64_t streams,
                      int64_t visible_cells) {
  if (context_ != nullptr) ggml_free(context_);
  context_ = ggml_init({ggml_tensor_overhead() * 2048 + ggml_graph_overhead(), nullptr, true});
  graph_ = ggml_new_graph(context_);
  value_at_ = nullptr;
  const int64_t kv_heads = shape_.kv_heads, heads = kv_heads * shape_.group;
  const int64_t each = tokens / streams;
  const auto input = [&](ggml_tensor* tensor) {
    ggml_set_input(tensor);
    return tensor;
  };
  at_ = input(ggml_new_tensor_1d(context_, GGML_TYPE_I64, tokens));
  mask_ = input(ggml_new_tensor_4d(context_, GGML_TYPE_F16, visible_cells, each, 1, streams));
  for (Layer& own : layers_) {
    own.new_k = input(ggml_new_tensor_2d(context_, GGML_TYPE_F32, own.k->ne[0], tokens));
    own.new_v = input(ggml_new_tensor_2d(context_, GGML_TYPE_F32, own.v->ne[0], tokens));
    own.q =
        input(ggml_new_tensor_4d(context_, GGML_TYPE_F32, shape_.key_dim, heads, each, streams));
    own.sinks = shape_.sinks ? input(ggml_new_tensor_1d(context_, GGML_TYPE_F32, heads)) : nullptr;
    const auto all = [&](ggml_tensor* cache) {
      return ggml_reshape_2d(context_, cache, cache->ne[0], shape_.cells * shape_.streams);
    };
    own.k_write = ggml_set_rows(context_, all(own.k), own.new_k, at_);
    own.v_write = shape_.flash ? ggml_set_rows(context_, all(own.v), own.new_v, at_)
                               : write_transposed(own, tokens);
    ggml_build_forward_expand(graph_, own.k_write);
    ggml_build_forward_expand(graph_, own.v_write);
    const auto view = [&](ggml_tensor* cache, int64_t dim) {
      return ggml_permute(context_,
                          ggml_view_4d(context_, cache, dim, kv_heads, visible_cells, streams,
                                       ggml_row_size(cache->type, dim), cache->nb[1], cache->nb[2],
                                       cache->nb[2] * size_t(first_stream)),
                          0, 2, 1, 3);
    };
    if (!shape_.flash) {
      own.out = attend_in_products(own, view(own.k, shape_.key_dim));
      continue;
    }
    ggml_tensor* v = shape_.values_are_keys ? own.k : own.v;
    own.out =
        ggml_flash_attn_ext(context_, ggml_permute(context_, own.q, 0, 2, 1, 3),
                            view(own.k, shape_.key_dim), view(v, shape_.value_dim), mask_,
                            1 / std::sqrt(float(shape_.key_dim)), shape_.max_bias, shape_.softcap);
    if (own.sinks != nullptr) ggml_flash_attn_ext_add_sinks(own.out, own.sinks);
    ggml_set_output(own.out);
    ggml_build_forward_expand(graph_, own.out);
  }
  ggml_backend_sched_reset(scheduler_);
  if (!ggml_backend_sched_alloc_graph(scheduler_, graph_)) throw std::runtime_error("no memory");
}

ggml_tensor* SmallHost::write_transposed(const Layer& own, int64_t tokens) {
  // A number at a time, as llama.cpp does it.
  if (value_at_ == nullptr) {
    value_at_ = ggml_new_tensor_1d(context_, GGML_TYPE_I64, tokens * own.v->ne[0]);
    ggml_set_input(value_at_);
  }
  return ggml_set_rows(context_, ggml_reshape_2d(context_, own.v, 1, ggml_nelements(own.v)),
                       ggml_reshape_2d(context_, own.new_v, 1, ggml_nelements(own.new_v)),
                       value_at_);
}

ggml_tensor* SmallHost::attend_in_products(const Layer& own, ggml_tensor* keys) {
  const int64_t dim = shape_.value_dim, cells = keys->ne[1];
  ggml_tensor* logits = ggml_mul_mat(context_, keys, ggml_permute(context_, own.q, 0, 2, 1, 3));
  ggml_tensor* weights =
      ggml_soft_max_ext(context_, logits, mask_, 1 / std::sqrt(float(shape_.key_dim)), 0);
  const size_t line = ggml_row_size(own.v->type, shape_.cells);
  ggml_tensor* values =
      ggml_view_3d(context_, own.v, cells, dim, shape_.kv_heads, line, line * size_t(dim), 0);
  ggml_tensor* out = ggml_mul_mat(context_, values, weights);
  ggml_set_output(out);
  ggml_build_forward_expand(graph_, out);
  return out;
}

void SmallHost::abort_after(int64_t questions) { questions_ = questions; }

StepResult SmallHost::step(const std::vector<Token>& tokens, int64_t visible_cells, bool again) {
  const int64_t count = int64_t(tokens.size()), first = tokens.front().stream;
  const int64_t streams = tokens.back().stream - first + 1;
  if (!again) build(count, first, streams, visible_cells);
  std::vector<int64_t> at, value_at;
  std::vector<ggml_fp16_t> mask;
  for (const Token& token : tokens) {
    at.push_back(token.stream * shape_.cells + token.cell);
    for (int64_t i = 0; i < layers_[0].v->ne[0]; ++i) {
      value_at.push_back(i * shape_.cells + token.cell);
    }
    for (int64_t cell = 0; cell < visible_cells; ++cell) {
      const bool sees = token.sees[size_t(cell)];
      mask.push_back(ggml_fp32_to_fp16(sees ? 0 : -std::numeric_limits<float>::infinity()));
    }
  }
  ggml_backend_tensor_set(at_, at.data(), 0, ggml_nbytes(at_));
  ggml_backend_tensor_set(mask_, mask.data(), 0, ggml_nbytes(mask_));
  if (value_at_ != nullptr) {
    ggml_backend_tensor_set(value_at_, value_at.data(), 0, ggml_nbytes(value_at_));
  }
  for (Layer& own : layers_) {
    fill(own.new_v);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::vector<float> key = numbers(own.k->ne[0], key_in(tokens[i].cell));
      ggml_backend_tensor_set(own.new_k, key.data(), i * own.new_k->nb[1], own.new_k->nb[1]);
    }
    own.queries = fill(own.q, looks_ ? 1.f : 0), own.sink_logits = fill(own.sinks);
  }
  StepResult result;
  const ggml_status status = ggml_backend_sched_graph_compute(scheduler_, graph_);
  questions_ = -1;
  result.aborted = status == GGML_STATUS_ABORTED;
  if (result.aborted) return result;
  if (status != GGML_STATUS_SUCCESS) throw std::runtime_error("the graph was not computed");
  for (const Layer& own : layers_) {
    const bool is_ours = ggml_backend_sched_get_tensor_backend(scheduler_, own.out) == ours_;
    result.ours += is_ours;
    for (ggml_tensor* write : {own.k_write, own.v_write}) {
      result.writes += ggml_backend_sched_get_tensor_backend(scheduler_, write) == ours_;
    }
    if (!is_ours) continue;  // the host's own business
    for (int64_t i = 0; i < count; ++i) {
      result.worst = std::max(result.worst, error_of(own, i, tokens[size_t(i)]));
    }
  }
  return result;
}

std::vector<float> SmallHost::row(const ggml_tensor* cache, int64_t cell, int64_t head,
                                  int64_t dim) const {
  std::vector<float> numbers(static_cast<size_t>(dim));
  const char* at = static_cast<const char*>(cache->data) + size_t(cell) * cache->nb[1] +
                   size_t(head) * ggml_row_size(cache->type, dim);
  if (cache->type == GGML_TYPE_F32) {
    std::memcpy(numbers.data(), at, numbers.size() * sizeof(float));
  } else {
    ggml_get_type_traits(cache->type)->to_float(at, numbers.data(), dim);
  }
  return numbers;
}

double SmallHost::error_of(const Layer& layer, int64_t number, const Token& token) const {
  const int64_t heads = shape_.kv_heads * shape_.group;
  const float scale = parameters_of(layer.out)[0];
  const ggml_tensor* values = shape_.values_are_keys ? layer.k : layer.v;
  double apart = 0, size = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const float* q = layer.queries.data() + (number * heads + h) * shape_.key_dim;
    const double sink = layer.sinks == nullptr ? -std::numeric_limits<double>::infinity()
                                               : layer.sink_logits[size_t(h)];
    double top = sink, total = 0;
    std::vector<std::pair<double, int64_t>> logits;
    for (size_t cell = 0; cell < token.sees.size(); ++cell) {
      if (!token.sees[cell]) continue;
      const int64_t global = token.stream * shape_.cells + int64_t(cell);
      const std::vector<float> key = row(layer.k, global, h / shape_.group, shape_.key_dim);
      double logit = 0;
      for (int64_t d = 0; d < shape_.key_dim; ++d) logit += double(q[d]) * key[size_t(d)];
      logit *= scale;
      if (shape_.softcap != 0) logit = shape_.softcap * std::tanh(logit / shape_.softcap);
      logits.emplace_back(logit, global);
      top = std::max(top, logit);
    }
    std::vector<double> sum(size_t(shape_.value_dim));
    if (layer.sinks != nullptr) total += std::exp(sink - top);
    for (const auto& [logit, cell] : logits) {
      const double weight = std::exp(logit - top);
      total += weight;
      const std::vector<float> value = row(values, cell, h / shape_.group, shape_.value_dim);
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * value[d];
    }
    const float* out =
        static_cast<const float*>(layer.out->data) + (number * heads + h) * shape_.value_dim;
    for (size_t d = 0; d < sum.size(); ++d) {
      apart += std::pow(out[d] - sum[d] / total, 2);
      size += std::pow(sum[d] / total, 2);
    }
  }
  return std::sqrt(apart / size);
}

void SmallHost::load_cells(int64_t stream, const std::vector<int64_t>& cells) {
  for (Layer& own : layers_) {
    for (ggml_tensor* cache : {own.k, own.v}) {
      std::vector<char> bytes(cache->nb[1]);
      for (const int64_t cell : cells) {
        const std::vector<float> made = numbers(cache->ne[0], cache == own.k ? key_in(cell) : 0);
        if (cache->type == GGML_TYPE_F32) {
          std::memcpy(bytes.data(), made.data(), bytes.size());
        } else {
          ggml_get_type_traits(cache->type)
              ->from_float_ref(made.data(), bytes.data(), cache->ne[0]);
        }
        const size_t at = size_t(stream * shape_.cells + cell) * cache->nb[1];
        ggml_backend_tensor_set(cache, bytes.data(), at, bytes.size());
      }
    }
  }
}

void SmallHost::copy_stream(int64_t from, int64_t to) {
  for (Layer& own : layers_) {
    for (ggml_tensor* cache : {own.k, own.v}) {
      const char* data = static_cast<const char*>(cache->data) + size_t(from) * cache->nb[2];
      ggml_backend_tensor_set(cache, data, size_t(to) * cache->nb[2], cache->nb[2]);
    }
  }
}

void SmallHost::shift_keys() {
  if (context_ != nullptr) ggml_free(context_);
  context_ = ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true});
  graph_ = ggml_new_graph(context_);
  const int64_t cells = shape_.cells * shape_.streams;
  ggml_tensor* shifts = ggml_new_tensor_1d(context_, GGML_TYPE_I32, cells);
  ggml_set_input(shifts);
  for (Layer& own : layers_) {
    ggml_tensor* keys = ggml_view_3d(context_, own.k, shape_.key_dim, shape_.kv_heads, cells,
                                     ggml_row_size(own.k->type, shape_.key_dim), own.k->nb[1], 0);
    ggml_build_forward_expand(
        graph_, ggml_rope_ext_inplace(context_, keys, shifts, nullptr, int(shape_.key_dim), 0, 0,
                                      10000, 1, 0, 1, 0, 0));
  }
  ggml_backend_sched_reset(scheduler_);
  ggml_backend_sched_alloc_graph(scheduler_, graph_);
  const std::vector<int32_t> by(size_t(cells), -7);
  ggml_backend_tensor_set(shifts, by.data(), 0, ggml_nbytes(shifts));
  ggml_backend_sched_graph_compute(scheduler_, graph_);
}

}  // namespace pariskv::ggml
