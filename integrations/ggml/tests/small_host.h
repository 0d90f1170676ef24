/**
 * A host of ggml with a KV cache laid out as llama.cpp's, a scheduler over the plugin and the CPU
 * backend, and attention computed plainly beside it.
 */
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace pariskv::ggml {

struct Shape {
  int64_t kv_heads = 2, group = 3, key_dim = 64, value_dim = 64;
  ggml_type key = GGML_TYPE_F16, value = GGML_TYPE_F16;
  int64_t cells = 640;  // of a stream
  int64_t streams = 1, layers = 3;
  bool sinks = false;
  float softcap = 0, max_bias = 0;
  bool flash = true;             // false: V is transposed, and attention is products
  bool values_are_keys = false;  // as in MLA
  const char* key_name = "cache_k_l%d";
};

/** A token of a step: where it goes, and what it sees of its stream. */
struct Token {
  int64_t stream = 0;
  int64_t cell = 0;
  std::vector<bool> sees;  // (cells)
};

/** What one step came to, over all layers. */
struct StepResult {
  double worst = 0;      // of a token and layer: how far the outputs are from plain ones
  int64_t ours = 0;      // layers that the plugin was given
  int64_t writes = 0;    // of rows of K and V, likewise
  bool aborted = false;  // see SmallHost::abort_after; what was computed is not looked at
};

class SmallHost {
 public:
  /** Loads the CPU backend and the plugin, once in a process. */
  static void load();
  /** All that was logged since the last call. */
  static std::string log();

  explicit SmallHost(const Shape& shape, uint32_t seed = 1);
  ~SmallHost();
  SmallHost(const SmallHost&) = delete;
  SmallHost& operator=(const SmallHost&) = delete;

  /**
   * A graph of all layers: writes, then attention over the first `visible_cells` of each stream.
   * @param tokens  as many of each stream, from the first named to the last, stream by stream
   * @param again   computes the last graph once more, with these tokens
   */
  StepResult step(const std::vector<Token>& tokens, int64_t visible_cells, bool again = false);

  /** The next step ends as a user wants it to: when the plugin asks for the so-manieth time. */
  void abort_after(int64_t questions);

  /** Other numbers in cells of a stream, which no node shows: a state that is loaded. */
  void load_cells(int64_t stream, const std::vector<int64_t>& cells);
  /**
   * From now on every query looks one way, and so do keys that are written to this cell: who finds
   * it attends to nothing else. -1: to none.
   */
  void look_for_needle(int64_t cell) { looks_ = true, needle_ = cell; }
  /** All keys change in place, by a node of a graph: a shift of positions. */
  void shift_keys();
  /** A stream's cells become another's. */
  void copy_stream(int64_t from, int64_t to);

 private:
  struct Layer {
    ggml_tensor *k, *v;
    ggml_tensor *new_k, *new_v, *q, *sinks, *out, *k_write, *v_write;
    std::vector<float> queries, sink_logits;  // a graph's inputs are gone when it is done
  };
  void build(int64_t tokens, int64_t first_stream, int64_t streams, int64_t visible_cells);
  ggml_tensor* write_transposed(const Layer& own, int64_t tokens);
  ggml_tensor* attend_in_products(const Layer& own, ggml_tensor* keys);
  /** Normal ones; where a needle is looked for its key and all queries are the same. */
  std::vector<float> numbers(int64_t count, float all = 0);
  std::vector<float> fill(ggml_tensor* tensor, float all = 0);
  float key_in(int64_t cell) const { return looks_ && cell == needle_ ? 3.f : 0; }
  std::vector<float> row(const ggml_tensor* cache, int64_t cell, int64_t head, int64_t dim) const;
  double error_of(const Layer& layer, int64_t number, const Token& token) const;

  Shape shape_;
  std::mt19937 random_;
  ggml_backend_t cpu_ = nullptr, ours_ = nullptr;
  ggml_backend_sched_t scheduler_ = nullptr;
  ggml_context *kept_ = nullptr, *context_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  std::vector<Layer> layers_;
  ggml_cgraph* graph_ = nullptr;
  ggml_tensor *at_ = nullptr, *value_at_ = nullptr, *mask_ = nullptr;
  int64_t questions_ = -1;  // until the step is aborted
  bool looks_ = false;
  int64_t needle_ = -1;
};

}  // namespace pariskv::ggml
