/**
 * A backend of ggml that a host loads by GGML_BACKEND_PATH, as it loads BLAS: it claims writes to
 * KV caches and the attention of steps over long ones, in the host's own memory, and hands on to
 * the host's CPU backend what it does not serve after all.
 */
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "host_cpu.h"
#include "store.h"

namespace pariskv::ggml {

namespace {

Settings settings;

/** How far the engine's outputs are from the host's, where Settings::check asks for both. */
struct Errors {
  double sum = 0, worst = 0;
  int64_t count = 0;
};

struct Context {
  HostCpu cpu;
  int threads = 1;
  ggml_abort_callback stops = nullptr;
  void* stops_data = nullptr;
  Errors errors;

  bool is_stopped() const { return stops != nullptr && stops(stops_data); }
};

Context& context_of(ggml_backend_t backend) { return *static_cast<Context*>(backend->context); }

bool is_view(const ggml_tensor* node) {
  return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
         node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

/** Tells the stores what a node has written to a KV cache. */
void report_write(const ggml_tensor* node) {
  const CacheTensor cache = cache_tensor_of(node);
  if (cache.root == nullptr) return;
  const auto store = store_of(cache.buffer(), settings);
  is_row_write(node) ? store->wrote_rows(node) : store->wrote_all();
}

/** One row to float16 is not worth waking threads for. */
bool write_few_rows(const ggml_tensor* node) {
  if (!is_row_write(node) || node->type != GGML_TYPE_F16 || node->src[0]->ne[1] > 4) return false;
  const ggml_tensor* rows = node->src[0];
  for (int64_t i = 0; i < rows->ne[1]; ++i) {
    const char* from = static_cast<const char*>(rows->data) + size_t(i) * rows->nb[1];
    char* to = static_cast<char*>(node->data) + size_t(written_cell(node, i)) * node->nb[1];
    host().ggml_fp32_to_fp16_row(reinterpret_cast<const float*>(from),
                                 reinterpret_cast<ggml_fp16_t*>(to), rows->ne[0]);
  }
  return true;
}

/** The host computes the step as well; the engine's outputs stay. */
ggml_status compare(Context& context, ggml_tensor* node) {
  const size_t count = size_t(node->ne[0] * node->ne[1] * node->ne[2] * node->ne[3]);
  auto* data = static_cast<float*>(node->data);
  const std::vector<float> ours(data, data + count);
  const ggml_status status = context.cpu.compute({node});
  double apart = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    apart += (double(ours[i]) - data[i]) * (double(ours[i]) - data[i]);
    size += double(data[i]) * data[i];
  }
  std::memcpy(data, ours.data(), count * sizeof(float));
  const double error = size > 0 ? std::sqrt(apart / size) : std::sqrt(apart);
  Errors& errors = context.errors;
  ++errors.count;
  errors.sum += error;
  if (!(error <= errors.worst)) errors.worst = error;
  return status;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) try {
  Context& context = context_of(backend);
  std::vector<ggml_tensor*> handed;  // to the host's CPU, those in a row at once
  const auto hand_over = [&] {
    if (handed.empty()) return GGML_STATUS_SUCCESS;
    const ggml_status status = context.cpu.compute(handed);
    if (status == GGML_STATUS_SUCCESS) {
      for (const ggml_tensor* node : handed) report_write(node);
    }
    handed.clear();
    return status;
  };
  for (int i = 0; i < host().ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = host().ggml_graph_node(graph, i);
    if (is_view(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    if (context.is_stopped()) return GGML_STATUS_ABORTED;
    if (node->op != GGML_OP_FLASH_ATTN_EXT) {
      if (handed.empty() && write_few_rows(node)) {
        report_write(node);
      } else {
        handed.push_back(node);
      }
      continue;
    }
    if (const ggml_status status = hand_over()) return status;
    const CacheTensor cache = cache_tensor_of(node->src[1]);
    const Outcome outcome =
        cache.root == nullptr
            ? Outcome::kLeft
            : store_of(cache.buffer(), settings)->attend(node, context.threads, [&context] {
                return context.is_stopped();
              });
    if (outcome == Outcome::kStopped) return GGML_STATUS_ABORTED;
    if (outcome == Outcome::kLeft) {
      handed.push_back(node);
    } else if (settings.check) {
      if (const ggml_status status = compare(context, node)) return status;
    }
  }
  return hand_over();
} catch (const std::exception& error) {
  say(GGML_LOG_LEVEL_ERROR, error.what());
  return GGML_STATUS_FAILED;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) try {
  if (is_view(op)) return true;
  if (!settings.on) return false;
  if (op->op == GGML_OP_FLASH_ATTN_EXT) {
    const Attention attention(op);
    return attention.key.root != nullptr &&
           store_of(attention.key.buffer(), settings)->claims_attention(attention) &&
           HostCpu::supports(op);
  }
  const CacheTensor cache = cache_tensor_of(op);
  if (cache.root == nullptr || !host().ggml_backend_buft_is_host(cache.buffer()->buft)) {
    return false;
  }
  return store_of(cache.buffer(), settings)->claims_write(cache, op->op == GGML_OP_SET_ROWS) &&
         HostCpu::supports(op);
} catch (const std::exception& error) {
  say(GGML_LOG_LEVEL_ERROR, error.what());
  return false;
}

const char* name(ggml_backend_dev_t) { return "ParisKV"; }
const char* description(ggml_backend_dev_t) {
  return "pariskv_core " PARISKV_VERSION_STRING ": attention over long KV caches by search";
}
void memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }
void properties(ggml_backend_dev_t device, ggml_backend_dev_props* out) {
  *out = {};
  out->name = name(device), out->description = description(device), out->type = type(device);
}
ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) {
  return host().ggml_backend_cpu_buffer_type();
}
bool supports_buffer(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return host().ggml_backend_buft_is_host(type);
}

const char* backend_name(ggml_backend_t) { return "ParisKV"; }
void free_backend(ggml_backend_t backend) {
  const Errors& errors = context_of(backend).errors;
  if (errors.count > 0) {
    say(GGML_LOG_LEVEL_INFO, "compared " + std::to_string(errors.count) +
                                 " layers' steps with the host's: error of an output, mean " +
                                 std::to_string(errors.sum / double(errors.count)) + ", worst " +
                                 std::to_string(errors.worst));
  }
  delete &context_of(backend);
  delete backend;
}
ggml_guid* guid() {
  static ggml_guid id = {0x70, 0x61, 0x72, 0x69, 0x73, 0x6b, 0x76, 0x2d,
                         0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x30, 0x30, 0x31};
  return &id;
}
ggml_backend_t start(ggml_backend_dev_t device, const char*) try {
  ggml_backend_i functions = {};
  functions.get_name = backend_name;
  functions.free = free_backend;
  functions.graph_compute = compute;
  auto context = std::make_unique<Context>();
  return new ggml_backend{guid(), functions, device, context.release()};
} catch (const std::exception& error) {
  say(GGML_LOG_LEVEL_ERROR, error.what());
  return nullptr;
}

void set_threads(ggml_backend_t backend, int threads) {
  context_of(backend).threads = threads;
  context_of(backend).cpu.set_threads(threads);
}
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback stops, void* data) {
  context_of(backend).stops = stops, context_of(backend).stops_data = data;
}

ggml_backend_dev_t device_of(ggml_backend_reg_t registry, size_t) {
  static ggml_backend_device device = [registry] {
    ggml_backend_device_i functions = {};
    functions.get_name = name, functions.get_description = description;
    functions.get_memory = memory, functions.get_type = type, functions.get_props = properties;
    functions.init_backend = start, functions.get_buffer_type = buffer_type;
    functions.supports_op = supports_op, functions.supports_buft = supports_buffer;
    return ggml_backend_device{functions, registry, nullptr};
  }();
  return &device;
}
const char* registry_name(ggml_backend_reg_t) { return "ParisKV"; }
size_t device_count(ggml_backend_reg_t) { return 1; }
void* function_of(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
    return reinterpret_cast<void*>(set_threads);
  }
  if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
    return reinterpret_cast<void*>(set_abort_callback);
  }
  return nullptr;
}

}  // namespace

}  // namespace pariskv::ggml

/** Called by the host when it has loaded this file. Null: it goes on without us. */
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() try {
  using namespace pariskv::ggml;
  const std::string refusal = load_host();
  if (!refusal.empty()) {
    say(GGML_LOG_LEVEL_ERROR, "not used: " + refusal);
    return nullptr;
  }
  if (const char* text = std::getenv("PARISKV_GGML")) settings = read_settings(text);
  static ggml_backend_reg registry = {
      GGML_BACKEND_API_VERSION, {registry_name, device_count, device_of, function_of}, nullptr};
  return &registry;
} catch (const std::exception& error) {
  pariskv::ggml::say(GGML_LOG_LEVEL_ERROR, std::string("not used: ") + error.what());
  return nullptr;
}
