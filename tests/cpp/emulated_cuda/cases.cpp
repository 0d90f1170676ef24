// The cases, and how one of them is run.
#include "cases.h"

#include <algorithm>
#include <limits>
#include <random>

#include "machine.h"

namespace pariskv::test {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/** The settings of the policy that all cases have. */
ParisKv& own(Config& config) { return std::get<ParisKv>(config.policy); }

Case make(const char* name, const std::function<void(Case&, Config&)>& change) {
  Case c;
  c.name = name;
  c.config.query_heads = 8;
  c.config.kv_heads = 2;
  c.config.head_dim = 128;
  c.config.dtype = DType::kBFloat16;
  c.config.sink = 4;
  c.config.local = 64;
  c.config.update = 128;
  own(c.config).top_k = 20;
  own(c.config).block = 0;  // zones of blocks open with 256 tokens
  c.config.dense_below = 0;
  c.config.segment_tokens = 256;
  own(c.config).schedule = {{0, 0.2, 0.25}};
  c.config.threads = 1;
  change(c, c.config);
  return c;
}

/** Keys that a cache has to cope with: zeros, NaN, tiny and huge ones, equal ones, dead channels.
 */
void spoil(Tensor& keys, DType dtype) {
  if (keys.tokens < 100) return;
  const float huge = dtype == DType::kFloat16 ? 1e4f : 1e30f;
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t d = 0; d < keys.dim; ++d) {
      for (int64_t i = 3; i < 6; ++i) keys.set(i, h, d, 0);
      keys.set(41, h, d, keys.get(41, h, d) * 1e-30f);
      for (int64_t i = 61; i < 70; ++i) keys.set(i, h, d, keys.get(60, h, d));
      if (h > 0) keys.set(42, h, d, keys.get(42, h, d) * huge);
    }
  }
  for (int64_t i = 0; i < keys.tokens; ++i) keys.set(i, 0, 1, 0);
  keys.set(40, 0, 3, kNan);
}

/** What a tensor holds: how many heads of what size. */
enum class Kind { kQuery, kKey, kValue, kOutput };

/** Runs a case with what it draws at random: the same for every backend. */
class Runner {
 public:
  Runner(const Case& c, const Config& config)
      : c_(c),
        config_(config),
        cache_(config),
        random_(7),
        next_queries_(rows(c.batch, Kind::kQuery)) {}

  Outcome run() {
    std::vector<float> bias(static_cast<size_t>(config_.query_heads));
    for (float& x : bias) x = 2 * normal();
    if (c_.softcap > 0) options_.softcap = c_.softcap;
    if (c_.sink_bias) {
      options_.sink_bias = TensorView::contiguous(bias.data(), DType::kFloat32,
                                                  {config_.query_heads}, config_.device);
    }
    prefill();
    for (int64_t step = 0; step < c_.steps; ++step) decode(step);
    options_.lse.reset();
    for (int64_t i = 0; i < c_.batch; ++i) look_at(i);
    attend();
    outcome_.stats = cache_.stats();
    return std::move(outcome_);
  }

 private:
  float normal() { return normal_(random_); }
  double uniform() { return double(random_() >> 8) / (1 << 24); }

  Tensor rows(int64_t tokens, Kind kind, int64_t gap = 0) const {
    const bool stored = kind == Kind::kKey || kind == Kind::kValue;
    const bool of_keys = kind == Kind::kKey || kind == Kind::kQuery;
    return Tensor(config_.dtype, tokens, stored ? config_.kv_heads : config_.query_heads,
                  of_keys ? config_.head_dim : cache_.config().value_dim, gap);
  }
  Tensor random_rows(int64_t tokens, Kind kind, int64_t gap = 0) {
    Tensor t = rows(tokens, kind, gap);
    t.fill([this] { return normal(); });
    return t;
  }

  struct Prompt {
    Tensor keys, values, queries;
  };

  Prompt prompt_of(int64_t index) {
    const bool first = index == 0;
    const int64_t tokens =
        first ? c_.tokens : std::max<int64_t>(1, int64_t(double(c_.tokens) * 1.3 * uniform()));
    Prompt prompt{random_rows(tokens, Kind::kKey), random_rows(tokens, Kind::kValue),
                  random_rows(c_.queries ? tokens : 0, Kind::kQuery)};
    Tensor& keys = prompt.keys;
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t h = 0; h < keys.heads; ++h) {
        const float length = 1 + 2 * float(uniform());
        for (int64_t d = 0; d < keys.dim; ++d) {
          keys.set(i, h, d, c_.equal_keys ? float(d * 7 % 5 - 2) : length * keys.get(i, h, d));
        }
      }
    }
    if (!c_.equal_keys) spoil(keys, config_.dtype);
    if (c_.hostile) keys.set(tokens - 2, 0, 5, kInfinity);
    return prompt;
  }

  /** Tokens of all, one after the other. */
  Tensor packed(const std::vector<Tensor>& parts, Kind kind) const {
    int64_t tokens = 0;
    for (const Tensor& part : parts) tokens += part.tokens;
    Tensor all = rows(tokens, kind);
    int64_t next = 0;
    for (const Tensor& part : parts) {
      for (int64_t i = 0; i < part.tokens; ++i, ++next) {
        for (int64_t h = 0; h < all.heads; ++h) {
          for (int64_t d = 0; d < all.dim; ++d) all.set(next, h, d, part.get(i, h, d));
        }
      }
    }
    return all;
  }

  /** Each prompt by itself, in chunks, or all in one call. */
  void prefill() {
    std::vector<Tensor> all_keys, all_values, all_queries;
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < c_.batch; ++i) {
      Prompt prompt = prompt_of(i);
      sequences_.push_back(cache_.add());
      if (!c_.packed) {
        prefill(prompt);
        continue;
      }
      lengths.push_back(prompt.keys.tokens);
      all_keys.push_back(std::move(prompt.keys));
      all_values.push_back(std::move(prompt.values));
      all_queries.push_back(std::move(prompt.queries));
    }
    if (!c_.packed) return;
    Tensor keys = packed(all_keys, Kind::kKey), values = packed(all_values, Kind::kValue);
    Tensor queries = packed(all_queries, Kind::kQuery);
    PrefillOptions options;
    if (c_.queries) options.q = queries.view(config_.device);
    cache_.prefill(0, sequences_, lengths, keys.view(config_.device), values.view(config_.device),
                   options);
    emulator::flush();  // before the rows are gone
  }
  void prefill(Prompt& prompt) {
    const int64_t tokens = prompt.keys.tokens;
    for (int64_t chunk = 0; chunk < c_.chunks; ++chunk) {
      const int64_t begin = tokens * chunk / c_.chunks, end = tokens * (chunk + 1) / c_.chunks;
      if (begin == end) continue;
      PrefillOptions options;
      if (c_.queries) options.q = prompt.queries.view(config_.device, begin, end - begin);
      cache_.prefill(0, {sequences_.back()}, {end - begin},
                     prompt.keys.view(config_.device, begin, end - begin),
                     prompt.values.view(config_.device, begin, end - begin), options);
      emulator::flush();
    }
  }

  /** Steps resemble one another, as they do in truth: so rows stay selected. */
  Tensor queries(int64_t step) {
    Tensor q = rows(c_.batch, Kind::kQuery, c_.gap);
    for (int64_t i = 0; i < c_.batch; ++i) {
      for (int64_t h = 0; h < q.heads; ++h) {
        for (int64_t d = 0; d < q.dim; ++d) {
          const float old = step == 0 ? 0 : next_queries_.get(i, h, d);
          next_queries_.set(i, h, d, step == 0 ? normal() : old + 0.3f * normal());
          q.set(i, h, d, next_queries_.get(i, h, d));
        }
      }
    }
    if (c_.hostile && step == 1) {
      q.set(0, 0, 0, kNan);
      q.set(0, 3, 3, kInfinity);
      for (int64_t d = 0; d < q.dim; ++d) q.set(0, 2, d, 0);
    }
    return q;
  }

  /** As decode(), by a graph that is recorded the first time. */
  void replay(int64_t step) {
    const Tensor q = queries(step);
    const Tensor k = random_rows(c_.batch, Kind::kKey), v = random_rows(c_.batch, Kind::kValue);
    const Device device = config_.device;
    if (graph_.empty()) {
      lasting_ = {q, k, v, rows(c_.batch, Kind::kOutput)};
      lasting_lse_.resize(size_t(c_.batch * config_.query_heads), kNan);
      options_.lse = TensorView::contiguous(lasting_lse_.data(), DType::kFloat32,
                                            {c_.batch, config_.query_heads}, device);
      graph_ = emulator::record([&] {
        cache_.decode(0, sequences_, lasting_[0].view(device), lasting_[1].view(device),
                      lasting_[2].view(device), lasting_[3].view(device), options_,
                      {const_cast<CUstream_st*>(emulator::kRecordedStream)});
      });
    }
    lasting_[0].take(q), lasting_[1].take(k), lasting_[2].take(v);
    cache_.advance(sequences_);
    emulator::replay(graph_);
    emulator::flush();
    outcome_.outputs.push_back(lasting_[3]);
    outcome_.log_sum_exps.push_back(lasting_lse_);
    between(step);
  }

  void decode(int64_t step) {
    const Device device = config_.device;
    if (c_.replayed && step > 0 && device.type == DeviceType::kCuda) return replay(step);
    Tensor q = queries(step);
    Tensor k = random_rows(c_.batch, Kind::kKey, c_.gap);
    Tensor v = random_rows(c_.batch, Kind::kValue, c_.gap);
    outcome_.outputs.push_back(rows(c_.batch, Kind::kOutput, c_.gap));
    outcome_.log_sum_exps.emplace_back(size_t(c_.batch * config_.query_heads), kNan);
    options_.lse = TensorView::contiguous(outcome_.log_sum_exps.back().data(), DType::kFloat32,
                                          {c_.batch, config_.query_heads}, device);
    cache_.decode(0, sequences_, q.view(device), k.view(device), v.view(device),
                  outcome_.outputs.back().view(device), options_);
    emulator::flush();
    between(step);
  }

  void between(int64_t step) {
    if (step == c_.flush_after) cache_.flush(sequences_);
    if (step == c_.truncate_after) {
      const int64_t most = cache_.length(sequences_[0]) - 1;
      cache_.truncate({sequences_[0]}, Cut::drop({std::min(c_.truncate_by, most)}));
    }
    emulator::flush();
  }

  void look_at(int64_t index) {
    const Device device = config_.device;
    const SequenceId sequence = sequences_[size_t(index)];
    Tensor q = random_rows(1, Kind::kQuery);
    const TensorView query =
        TensorView::contiguous(q.view(device).data, config_.dtype, {q.heads, q.dim}, device);
    outcome_.explanations.push_back(cache_.explain(0, sequence, query, options_));
    outcome_.summaries.push_back(cache_.summaries(0, sequence));
    const int64_t length = cache_.length(sequence);
    Tensor keys = rows(length, Kind::kKey), values = rows(length, Kind::kValue);
    cache_.read(0, sequence, 0, keys.view(device), values.view(device));
    emulator::flush();
    outcome_.rows.push_back(std::move(keys));
    outcome_.rows.push_back(std::move(values));
  }

  /** The last tokens of all, as many of each as there may be: of one 5, of the next 4. */
  void attend() {
    std::vector<Tensor> queries;
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < c_.batch; ++i) {
      lengths.push_back(std::min(5 - i % 5, cache_.length(sequences_[size_t(i)])));
      queries.push_back(random_rows(lengths.back(), Kind::kQuery));
    }
    Tensor q = packed(queries, Kind::kQuery);
    outcome_.outputs.push_back(rows(q.tokens, Kind::kOutput));
    cache_.attend(0, sequences_, lengths, q.view(config_.device),
                  outcome_.outputs.back().view(config_.device), options_);
    emulator::flush();
  }

  const Case& c_;
  const Config& config_;
  Cache cache_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  Tensor next_queries_;
  AttendOptions options_;
  std::vector<SequenceId> sequences_;
  Outcome outcome_;
  emulator::Recording graph_;
  std::vector<Tensor> lasting_;  // what the graph reads and writes
  std::vector<float> lasting_lse_;
};

}  // namespace

Outcome run(const Case& c, const Config& config) { return Runner(c, config).run(); }

std::vector<Case> all_cases() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  const auto votes = [](Config& config) { own(config).scorer = Scorer::kVotes; };
  const auto mean = [](Config& config) { own(config).group_rule = GroupRule::kMeanQuery; };
  const auto tail = [](Case& c, Config& config, int64_t rows) {
    own(config).block = 64, own(config).tail = TailRule::kSample, own(config).tail_rows = rows;
    c.queries = true;
  };
  const auto blocks = [](Case& c, Config& config, int64_t size) {
    own(config).block = size, c.queries = true;
  };
  return {
      make("nothing_to_search", [](Case& c, Config&) { c.tokens = 10; }),
      make("blocks_of_64", [=](Case& c, Config& k) { blocks(c, k, 64); }),
      make("blocks_of_256_without_queries",
           [](Case& c, Config& k) { own(k).block = 256, c.device = 0, c.twin = 1; }),
      make("blocks_float32_80_softcap_and_bias",
           [=](Case& c, Config& k) {
             blocks(c, k, 128), k.dtype = kFloat, k.head_dim = 80;
             c.softcap = 20, c.sink_bias = true, c.chunks = 5;
           }),
      make("blocks_float16_256_mean",
           [=](Case& c, Config& k) { blocks(c, k, 128), k.dtype = kHalf, k.head_dim = 256, mean(k); }),
      make("blocks_64_of_a_group_of_twenty",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), k.query_heads = 20, k.kv_heads = 1, k.head_dim = 64;
           }),
      make("blocks_of_a_group_of_one",
           [=](Case& c, Config& k) { blocks(c, k, 64), k.query_heads = 2, k.dtype = kHalf; }),
      make("blocks_512_in_odd_segments",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), k.segment_tokens = 192, k.head_dim = 512, c.tokens = 1500;
           }),
      make("blocks_in_chunks_of_sums",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.tokens = 9000, c.steps = 2, c.device = 5, k.sink = 70;
           }),
      make("blocks_replayed",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.replayed = true, c.steps = 20, c.flush_after = 5;
             c.truncate_after = 14, c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("blocks_in_branches",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.device = 0, c.twin = 4, c.batch = 3, c.tokens = 500, c.steps = 2;
             c.packed = true, k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64;
           }),
      make("blocks_hostile", [=](Case& c, Config& k) { blocks(c, k, 64), c.hostile = true; }),
      make("blocks_of_equal_keys",
           [=](Case& c, Config& k) { blocks(c, k, 128), c.equal_keys = true, own(k).top_k = 300; }),
      make("tail", [=](Case& c, Config& k) { tail(c, k, 32); }),
      make("tail_in_blocks_of_a_head",
           [=](Case& c, Config& k) { tail(c, k, 64), c.device = 0, c.twin = 5, c.tokens = 3000; }),
      make("tail_on_the_device",
           [=](Case& c, Config& k) {
             tail(c, k, 16), k.placement = Placement::kDevice, k.dtype = kHalf, c.softcap = 20;
           }),
      make("tail_replayed",
           [=](Case& c, Config& k) {
             tail(c, k, 32), c.replayed = true, c.steps = 28, c.flush_after = 5, c.tokens = 700;
             c.truncate_after = 14, c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("tail_of_a_group_of_twenty_256",
           [=](Case& c, Config& k) {
             tail(c, k, 64), k.query_heads = 20, k.kv_heads = 1, k.head_dim = 256;
             c.sink_bias = true;
           }),
      make("tail_float32_keys_64_values_192",
           [=](Case& c, Config& k) {
             tail(c, k, 32), k.dtype = kFloat, k.head_dim = 64, k.value_dim = 192, c.batch = 3;
           }),
      make("tail_hostile", [=](Case& c, Config& k) { tail(c, k, 32), c.hostile = true; }),
      make("tail_that_counts_for_nothing",
           [=](Case& c, Config& k) {
             tail(c, k, 32), own(k).top_k = 4096, own(k).schedule = {{0, 1, 1}};
           }),
      make("few_keys", [](Case& c, Config&) { c.tokens = 90; }),
      make("large_device", [](Case& c, Config&) { c.device = 0, c.twin = 1; }),
      make("steps_apart",
           [](Case& c, Config&) { c.device = 0, c.twin = 1, c.apart = true, c.tokens = 4500; }),
      make("very_many_processors", [](Case& c, Config&) { c.device = 3, c.twin = 4; }),
      make("three_processors", [](Case& c, Config&) { c.device = 5, c.twin = 2; }),
      make("little_shared_memory", [](Case& c, Config& k) { c.device = 6, k.head_dim = 256; }),
      make("long", [](Case& c, Config& k) { c.tokens = 9000, own(k).top_k = 2048; }),
      make("many_candidates",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 1, c.batch = 2, c.tokens = 9600, c.steps = 2;
             own(k).top_k = 2200;
           }),
      make("float32_64", [](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 64; }),
      make("float32_80_votes",
           [=](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 80, votes(k); }),
      make("float32_256_mean_softcap",
           [=](Case& c, Config& k) {
             k.dtype = kFloat, k.head_dim = 256, mean(k);
             c.softcap = 20, c.sink_bias = true;
           }),
      make("bfloat16_128_softcap_and_bias",
           [](Case& c, Config&) { c.softcap = 20, c.sink_bias = true; }),
      make("bfloat16_80_softcap_and_bias",
           [](Case& c, Config& k) { k.head_dim = 80, c.softcap = 15, c.sink_bias = true; }),
      make("float16_256_votes_softcap_and_bias",
           [=](Case& c, Config& k) {
             k.dtype = kHalf, k.head_dim = 256, votes(k);
             c.softcap = 20, c.sink_bias = true;
           }),
      // 2^33 elements in a segment: the last head's rows begin beyond 2^32 of them.
      make("elements_beyond_32_bits",
           [](Case& c, Config& k) {
             c.device_segment = int64_t{1} << 20;
             k.query_heads = k.kv_heads = 16, k.head_dim = 256, c.tokens = 300, c.steps = 2;
           }),
      make("most_rows",
           [](Case& c, Config& k) { c.tokens = 6000, c.steps = 2, own(k).top_k = 4096; }),
      make("float16_64_votes_mean",
           [=](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 64, votes(k), mean(k); }),
      make("float16_96", [](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 96; }),
      make("float16_128", [](Case&, Config& k) { k.dtype = kHalf; }),
      make("bfloat16_80", [](Case&, Config& k) { k.head_dim = 80; }),
      make("bfloat16_256_votes", [=](Case&, Config& k) { k.head_dim = 256, votes(k); }),
      make("bfloat16_192", [](Case&, Config& k) { k.head_dim = 192; }),
      make("float32_192_votes",
           [=](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 192, votes(k); }),
      make("bfloat16_512",
           [](Case& c, Config& k) { k.head_dim = 512, c.softcap = 20, c.sink_bias = true; }),
      make("float16_512_mean",
           [=](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 512, mean(k); }),
      make("float32_512_little_shared_memory",
           [](Case& c, Config& k) { c.device = 6, k.dtype = kFloat, k.head_dim = 512; }),
      make("bfloat16_512_in_blocks_of_a_head",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 5, c.tokens = 3000, c.steps = 2, k.head_dim = 512;
           }),
      make("keys_192_values_128",
           [](Case& c, Config& k) { k.head_dim = 192, k.value_dim = 128, c.twin = 2; }),
      make("keys_64_values_512_row_cache_that_evicts",
           [](Case& c, Config& k) {
             k.dtype = kHalf, k.head_dim = 64, k.value_dim = 512, k.row_cache = 16, c.steps = 8;
           }),
      make("keys_512_values_64_float32",
           [](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 512, k.value_dim = 64; }),
      make("keys_80_values_256_in_strides",
           [](Case& c, Config& k) {
             k.head_dim = 80, k.value_dim = 256, c.batch = 3, c.gap = 3, c.tokens = 700;
           }),
      make("keys_64_values_192_replayed_group_of_twenty",
           [](Case& c, Config& k) {
             k.query_heads = 20, k.kv_heads = 1, k.dtype = kFloat, k.head_dim = 64;
             k.value_dim = 192, c.replayed = true, c.steps = 5;
           }),
      make("group_of_one", [](Case&, Config& k) { k.query_heads = 2; }),
      make("group_of_five_votes", [=](Case&, Config& k) { k.query_heads = 10, votes(k); }),
      make("group_of_sixteen", [](Case&, Config& k) { k.query_heads = 32; }),
      make("group_of_twenty_float32",
           [](Case&, Config& k) { k.query_heads = 20, k.kv_heads = 1, k.dtype = kFloat; }),
      make("group_of_twenty_64",
           [](Case&, Config& k) { k.query_heads = 20, k.kv_heads = 1, k.head_dim = 64; }),
      make("no_row_cache", [](Case& c, Config& k) { k.row_cache = 0, c.steps = 5; }),
      make("row_cache_that_evicts", [](Case& c, Config& k) { k.row_cache = 16, c.steps = 12; }),
      make("rows_on_the_device", [](Case&, Config& k) { k.placement = Placement::kDevice; }),
      make("batch_of_three", [](Case& c, Config&) { c.batch = 3, c.twin = 2; }),
      make("batch_in_one_call", [](Case& c, Config&) { c.batch = 6, c.packed = true; }),
      make("batch_with_strides_and_chunks",
           [=](Case& c, Config& k) {
             c.batch = 5, c.gap = 8, c.chunks = 3, c.tokens = 700;
             k.dtype = kHalf, votes(k);
           }),
      make("batch_with_gaps_of_eight",
           [](Case& c, Config&) { c.batch = 3, c.gap = 8, c.tokens = 700; }),
      make("batch_with_gaps_of_three",
           [](Case& c, Config&) { c.batch = 3, c.gap = 3, c.tokens = 700; }),
      make("batch_in_branches",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 4, c.batch = 3, c.tokens = 400, c.steps = 2;
             k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64;
           }),
      make("flush_and_truncate",
           [](Case& c, Config& k) {
             c.steps = 24, c.flush_after = 6, c.truncate_after = 10, c.truncate_by = 150;
             k.update = 8, k.local = 16;
           }),
      make("replayed",
           [](Case& c, Config& k) {
             c.replayed = true, c.steps = 28, c.flush_after = 5, c.truncate_after = 14;
             c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("replayed_votes_in_branches",
           [=](Case& c, Config& k) {
             c.replayed = true, c.steps = 4, c.device = 4, c.batch = 3, c.tokens = 300, votes(k);
             k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64, k.update = 8, k.local = 16;
           }),
      make("replayed_into_more_candidates",
           [](Case& c, Config& k) {
             c.replayed = true, c.steps = 24, c.tokens = 500, k.update = 8, k.local = 16;
             own(k).schedule = {{0, 0.1, 0.2}, {520, 0.5, 0.2}};
           }),
      make("equal_keys",
           [=](Case& c, Config& k) { c.equal_keys = true, own(k).top_k = 300, votes(k); }),
      make("hostile", [](Case& c, Config&) { c.hostile = true; }),
      make("hostile_votes", [=](Case& c, Config& k) { c.hostile = true, votes(k); }),
      make("small_segments", [](Case&, Config& k) { k.segment_tokens = 64, k.sink = 0; }),
      make("odd_segments", [](Case& c, Config& k) { k.segment_tokens = 192, c.tokens = 2500; }),
      make("more_rows_than_a_block_lists",
           [](Case& c, Config& k) {
             c.device = 1, c.twin = 0, c.tokens = 9000, c.steps = 2, own(k).top_k = 2400;
           }),
      // With one head rows set out before all are known.
      make("early_rows_and_more_than_listed",
           [](Case& c, Config& k) {
             c.tokens = 9000, c.steps = 2, k.query_heads = 4, k.kv_heads = 1, own(k).top_k = 2300;
             own(k).min_candidates_per_row = 1, own(k).schedule = {{0, 0.4, 0.2}};
           }),
      make("early_rows_and_row_cache",
           [](Case& c, Config& k) {
             k.query_heads = 4, k.kv_heads = 1, k.row_cache = 16, c.steps = 12;
           }),
  };
}

}  // namespace pariskv::test
