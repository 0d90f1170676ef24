// One layer's attention over a long KV cache: ggml's CPU backend, with and without flash attention,
// beside the plugin. Prints a line for each shape; rows are random, steps of one token.
//
//   PARISKV_GGML=from=1024 pariskv_ggml_bench [tokens ...]
#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

constexpr int kSteps = 15, kThreads = 2;

struct Shape {
  const char* name;
  int64_t heads, kv_heads, dim;
  ggml_type type;
};

struct Layer {
  ggml_context* kept;
  ggml_tensor *k, *v, *transposed;
  ggml_backend_buffer_t buffer;
};

void fill(ggml_tensor* tensor) {
  std::minstd_rand random(1);
  std::normal_distribution<float> normal;
  std::vector<float> row(size_t(tensor->ne[0]));
  std::vector<char> bytes(tensor->nb[1]);
  for (int64_t i = 0; i < ggml_nrows(tensor); ++i) {
    // Normal numbers take long to make; a few hundred rows of them are enough.
    if (i < 512) {
      for (float& number : row) number = normal(random);
      ggml_get_type_traits(tensor->type)->from_float_ref(row.data(), bytes.data(), tensor->ne[0]);
    } else {
      ggml_backend_tensor_get(tensor, bytes.data(), random() % 512 * tensor->nb[1], bytes.size());
    }
    ggml_backend_tensor_set(tensor, bytes.data(), size_t(i) * tensor->nb[1], bytes.size());
  }
}

Layer make(const Shape& shape, int64_t cells) {
  Layer layer{};
  layer.kept = ggml_init({ggml_tensor_overhead() * 4, nullptr, true});
  layer.k = ggml_new_tensor_3d(layer.kept, shape.type, shape.dim * shape.kv_heads, cells, 1);
  layer.v = ggml_new_tensor_3d(layer.kept, shape.type, shape.dim * shape.kv_heads, cells, 1);
  layer.transposed =
      ggml_new_tensor_3d(layer.kept, GGML_TYPE_F16, cells, shape.dim, shape.kv_heads);
  ggml_set_name(layer.k, "cache_k_l0");
  ggml_set_name(layer.v, "cache_v_l0");
  layer.buffer =
      ggml_backend_alloc_ctx_tensors_from_buft(layer.kept, ggml_backend_cpu_buffer_type());
  ggml_backend_buffer_clear(layer.buffer, 0);
  for (ggml_tensor* tensor : {layer.k, layer.v, layer.transposed}) fill(tensor);
  return layer;
}

/** Milliseconds of a step, median and first; -1: a type that this way cannot read. */
struct Times {
  double first, median;
};

Times steps(const Shape& shape, const Layer& layer, int64_t tokens, const char* backend,
            bool flash) {
  if (!flash && shape.type != GGML_TYPE_F16) return {-1, -1};
  ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  std::vector<ggml_backend_t> all = {cpu};
  if (std::strcmp(backend, "CPU") != 0)
    all.insert(all.begin(), ggml_backend_init_by_name(backend, nullptr));
  for (ggml_backend_t each : all) {
    auto* registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(each));
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    set(each, kThreads);
  }
  ggml_backend_sched_t scheduler =
      ggml_backend_sched_new(all.data(), nullptr, int(all.size()), 256, false, false);
  const int64_t cells = layer.k->ne[1];
  std::vector<double> times;
  for (int64_t step = 0; step < kSteps + 2; ++step) {
    ggml_context* context =
        ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true});
    ggml_cgraph* graph = ggml_new_graph(context);
    ggml_tensor* at = ggml_new_tensor_1d(context, GGML_TYPE_I64, 1);
    ggml_tensor* row = ggml_new_tensor_2d(context, GGML_TYPE_F32, layer.k->ne[0], 1);
    ggml_tensor* q = ggml_new_tensor_4d(context, GGML_TYPE_F32, shape.dim, shape.heads, 1, 1);
    ggml_tensor* mask =
        ggml_new_tensor_4d(context, flash ? GGML_TYPE_F16 : GGML_TYPE_F32, cells, 1, 1, 1);
    for (ggml_tensor* input : {at, row, q, mask}) ggml_set_input(input);
    ggml_build_forward_expand(graph, ggml_set_rows(context, layer.k, row, at));
    ggml_build_forward_expand(graph, ggml_set_rows(context, layer.v, row, at));
    const auto view = [&](ggml_tensor* cache) {
      return ggml_permute(
          context,
          ggml_view_4d(context, cache, shape.dim, shape.kv_heads, cells, 1,
                       ggml_row_size(cache->type, shape.dim), cache->nb[1], cache->nb[2], 0),
          0, 2, 1, 3);
    };
    ggml_tensor* queries = ggml_permute(context, q, 0, 2, 1, 3);
    const float scale = 1 / std::sqrt(float(shape.dim));
    ggml_tensor* out;
    if (flash) {
      out = ggml_flash_attn_ext(context, queries, view(layer.k), view(layer.v), mask, scale, 0, 0);
    } else {
      ggml_tensor* logits = ggml_mul_mat(context, view(layer.k), queries);
      out = ggml_mul_mat(context, layer.transposed,
                         ggml_soft_max_ext(context, logits, mask, scale, 0));
    }
    ggml_set_output(out);
    ggml_build_forward_expand(graph, out);
    ggml_backend_sched_reset(scheduler);
    ggml_backend_sched_alloc_graph(scheduler, graph);
    const int64_t cell = tokens + step;
    ggml_backend_tensor_set(at, &cell, 0, sizeof cell);
    std::minstd_rand random(unsigned(step) + 7);
    std::normal_distribution<float> normal;
    for (ggml_tensor* input : {row, q}) {
      std::vector<float> numbers(size_t(ggml_nelements(input)));
      for (float& number : numbers) number = normal(random);
      ggml_backend_tensor_set(input, numbers.data(), 0, ggml_nbytes(input));
    }
    std::vector<float> sees(size_t(cells), -std::numeric_limits<float>::infinity());
    std::fill_n(sees.begin(), cell + 1, 0.f);
    std::vector<ggml_fp16_t> halves(sees.size());
    ggml_fp32_to_fp16_row(sees.data(), halves.data(), cells);
    ggml_backend_tensor_set(mask, flash ? static_cast<void*>(halves.data()) : sees.data(), 0,
                            ggml_nbytes(mask));
    const auto begin = std::chrono::steady_clock::now();
    ggml_backend_sched_graph_compute(scheduler, graph);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count());
    ggml_free(context);
  }
  ggml_backend_sched_free(scheduler);
  for (ggml_backend_t each : all) ggml_backend_free(each);
  // Of the plugin the first step claims the writes, the second takes the cache in.
  const double first = times[1];
  std::sort(times.begin() + 2, times.end());
  return {first, times[2 + kSteps / 2]};
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<int64_t> depths;
  for (int i = 1; i < count; ++i) depths.push_back(std::atoll(arguments[i]));
  if (depths.empty()) depths = {8192, 32768, 131072};
  ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  if (ggml_backend_load(PARISKV_TEST_CPU) == nullptr ||
      ggml_backend_load(PARISKV_TEST_PLUGIN) == nullptr) {
    return std::fprintf(stderr, "a backend did not load\n"), 1;
  }
  const Shape shapes[] = {{"SmolLM2-135M", 9, 3, 64, GGML_TYPE_F16},
                          {"Qwen2.5-1.5B", 12, 2, 128, GGML_TYPE_F16},
                          {"Qwen2.5-1.5B", 12, 2, 128, GGML_TYPE_Q8_0},
                          {"Llama-8B", 32, 8, 128, GGML_TYPE_F16},
                          {"Llama-8B", 32, 8, 128, GGML_TYPE_Q8_0}};
  std::printf("| one layer of | cache | tokens | FA off, ms | FA on | plugin | first step |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  for (const Shape& shape : shapes) {
    for (const int64_t tokens : depths) {
      const Layer layer = make(shape, tokens + 256);
      const Times off = steps(shape, layer, tokens, "CPU", false);
      const Times on = steps(shape, layer, tokens, "CPU", true);
      const Times ours = steps(shape, layer, tokens, "ParisKV", true);
      char without[32] = "–";
      if (off.median > 0) std::snprintf(without, sizeof without, "%.2f", off.median);
      std::printf("| %s | %s | %lld | %s | %.2f | %.2f | %.0f |\n", shape.name,
                  ggml_type_name(shape.type), (long long)tokens, without, on.median, ours.median,
                  ours.first);
      std::fflush(stdout);
      ggml_backend_buffer_free(layer.buffer);
      ggml_free(layer.kept);
    }
  }
  return 0;
}
