// Steps of a whole model deep in a context, without the hours that a CPU takes to read so long a
// prompt: one part of it is read, its state is loaded as often as it takes, positions are shifted
// and the parts become one sequence. Prints the time of the first step, and of a later one.
//
//   deep MODEL PART PARTS f16|q8_0 on|off     with GGML_BACKEND_PATH: the plugin
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kSteps = 24, kThreads = 2;

double now() {
  const std::chrono::duration<double, std::milli> time =
      std::chrono::steady_clock::now().time_since_epoch();
  return time.count();
}

bool decode(llama_context* context, const std::vector<llama_token>& tokens, int position) {
  llama_batch batch = llama_batch_init(int(tokens.size()), 0, 1);
  for (const llama_token token : tokens) {
    const int i = batch.n_tokens++;
    batch.token[i] = token, batch.pos[i] = position + i;
    batch.n_seq_id[i] = 1, batch.seq_id[i][0] = 0, batch.logits[i] = 0;
  }
  batch.logits[batch.n_tokens - 1] = 1;
  const bool done = llama_decode(context, batch) == 0;
  llama_batch_free(batch);
  return done;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return std::fprintf(stderr, "deep MODEL PART PARTS f16|q8_0 on|off\n"), 2;
  const int part = std::atoi(arguments[2]), parts = std::atoi(arguments[3]);
  const ggml_type type = std::strcmp(arguments[4], "f16") == 0 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
  const bool flash = std::strcmp(arguments[5], "on") == 0;
  const char* verbose = std::getenv("DEEP_VERBOSE");
  if (verbose == nullptr) llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_model* model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  if (model == nullptr) return std::fprintf(stderr, "no model\n"), 1;
  llama_context_params own = llama_context_default_params();
  own.n_ctx = uint32_t(part * (parts + 1) + 512), own.n_batch = own.n_ubatch = 512;
  own.n_seq_max = uint32_t(parts + 1), own.kv_unified = true;
  own.n_threads = own.n_threads_batch = kThreads;
  own.type_k = own.type_v = type;
  own.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* context = llama_init_from_model(model, own);
  if (context == nullptr) return std::fprintf(stderr, "no context\n"), 1;
  const int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<llama_token> tokens;
  for (int i = 0; i < part; ++i) tokens.push_back(llama_token(1000 + 7919LL * i % (words / 2)));
  const double begun = now();
  for (int i = 0; i < part; i += 512) {
    const auto end = tokens.begin() + std::min(i + 512, part);
    if (!decode(context, {tokens.begin() + i, end}, i)) return 1;
  }
  const double read = now() - begun;

  llama_memory_t memory = llama_get_memory(context);
  std::vector<uint8_t> state(llama_state_seq_get_size(context, 0));
  llama_state_seq_get_data(context, state.data(), state.size(), 0);
  for (int other = 1; other < parts; ++other) {
    if (llama_state_seq_set_data(context, state.data(), state.size(), other) == 0) return 1;
    llama_memory_seq_add(memory, other, 0, -1, other * part);
    llama_memory_seq_cp(memory, other, 0, -1, -1);
    llama_memory_seq_rm(memory, other, -1, -1);
  }
  std::vector<double> times;
  for (int step = 0; step < kSteps; ++step) {
    const double start = now();
    if (!decode(context, {llama_token(2000 + step)}, part * parts + step)) return 1;
    llama_synchronize(context);
    times.push_back(now() - start);
  }
  // The first step of all shifts positions, and the plugin's second one takes the cache in.
  const double first = *std::max_element(times.begin() + 1, times.begin() + 4);
  std::sort(times.begin() + 4, times.end());
  std::printf(
      "%d tokens, %s, flash attention %s: %.1f ms a step, the slowest of the first %.0f; "
      "%d tokens of prompt took %.0f ms\n",
      part * parts, arguments[4], arguments[5], times[4 + (kSteps - 4) / 2], first, part, read);
  llama_free(context);
  llama_model_free(model);
  return 0;
}
