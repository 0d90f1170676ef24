// How a case is run.
#include "cases.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>

#include "machine.h"

namespace pariskv::test {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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

/**
 * Infinite values, each in a dimension of its own: so an output shows which rows it is made of. Of
 * the first head a key in the window is infinite, of the second one keys all over, and some NaN.
 * Half of the dimensions stay finite, but for one of the row with that key.
 */
void scatter_infinities(Tensor& keys, Tensor& values) {
  const int64_t tokens = keys.tokens, probes = values.dim / 2;
  for (int64_t d = 0; d < probes; ++d) {
    const int64_t token = d * tokens / probes;
    for (int64_t h = 0; h < values.heads; ++h) {
      // Of a row of the tail whose key is broken, too, a GPU adds nothing times this: NaN.
      if (h == 1 && token % 48 == 0) continue;
      values.set(token, h, d, d % 3 == 0 ? -kInfinity : kInfinity);
    }
  }
  keys.set(tokens - 2, 0, 5, kInfinity);
  values.set(tokens - 2, 0, values.dim - 1, kInfinity);
  if (values.heads == 1) return;
  for (int64_t i = 1; 48 * i < tokens - 100; ++i) {
    keys.set(48 * i, 1, i, i % 2 == 0 ? kInfinity : kNan);
  }
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
    options_.lse.reset(), options_.error.reset();
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
    // Beside a huge key an infinite value has no weight: NaN, or not, by the order of the rows.
    if (!c_.equal_keys && !c_.infinite) spoil(keys, config_.dtype);
    if (c_.hostile) keys.set(tokens - 2, 0, 5, kInfinity);
    if (c_.infinite) scatter_infinities(keys, prompt.values);
    if (c_.hostile && tokens > 30) prompt.values.set(tokens - 30, 1, 3, kNan);
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
      sequences_.push_back(added(i));
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

  /** Steps write what they return beside the output there. */
  void wants(std::vector<float>& lse, std::vector<float>& errors) {
    const auto room = [&](std::vector<float>& numbers, int64_t heads) {
      numbers.assign(size_t(c_.batch * heads), -1.0f);
      return TensorView::contiguous(numbers.data(), DType::kFloat32, {c_.batch, heads},
                                    config_.device);
    };
    options_.lse = room(lse, config_.query_heads);
    if (c_.errors) options_.error = room(errors, config_.kv_heads);
  }

  std::vector<SequenceId> lanes_of(int64_t step) const {
    std::vector<SequenceId> lanes = sequences_;
    if (c_.idle && step % (c_.batch + 1) < c_.batch) lanes[size_t(step % (c_.batch + 1))] = kIdle;
    return lanes;
  }

  /** As decode(), by a graph that is recorded the first time. */
  void replay(int64_t step) {
    const Tensor q = queries(step);
    const Tensor k = random_rows(c_.batch, Kind::kKey), v = random_rows(c_.batch, Kind::kValue);
    const Device device = config_.device;
    if (graph_.empty()) {
      lasting_ = {q, k, v, rows(c_.batch, Kind::kOutput)};
      wants(lasting_lse_, lasting_errors_);
      graph_ = emulator::record([&] {
        const std::vector<SequenceId> idle(sequences_.size(), kIdle);
        cache_.decode(0, c_.idle ? idle : sequences_, lasting_[0].view(device),
                      lasting_[1].view(device), lasting_[2].view(device), lasting_[3].view(device),
                      options_, {const_cast<CUstream_st*>(emulator::kRecordedStream)});
      });
    }
    lasting_[0].take(q), lasting_[1].take(k), lasting_[2].take(v);
    cache_.advance(lanes_of(step));
    emulator::replay(graph_);
    emulator::flush();
    outcome_.outputs.push_back(lasting_[3]);
    outcome_.log_sum_exps.push_back(lasting_lse_);
    outcome_.errors.push_back(lasting_errors_);
    between(step);
  }

  void decode(int64_t step) {
    const Device device = config_.device;
    if (c_.replayed && step > 0 && device.type == DeviceType::kCuda) return replay(step);
    Tensor q = queries(step);
    Tensor k = random_rows(c_.batch, Kind::kKey, c_.gap);
    Tensor v = random_rows(c_.batch, Kind::kValue, c_.gap);
    if (c_.infinite && step == 1) v.set(0, 0, v.dim - 2, kInfinity);
    outcome_.outputs.push_back(rows(c_.batch, Kind::kOutput, c_.gap));
    wants(outcome_.log_sum_exps.emplace_back(), outcome_.errors.emplace_back());
    cache_.decode(0, lanes_of(step), q.view(device), k.view(device), v.view(device),
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
    if (step == c_.fork_after) {
      const SequenceId twin = cache_.fork(sequences_[0]);
      cache_.remove(sequences_[0]);
      sequences_[0] = twin;
    }
    emulator::flush();
    if (!std::holds_alternative<ParisKV>(config_.policy)) note_kept();
    if (step == c_.saved_after) {
      for (SequenceId& sequence : sequences_) sequence = saved_and_loaded(sequence);
    }
  }

  void note_kept() {
    Tensor q = rows(1, Kind::kQuery);
    for (int64_t h = 0; h < q.heads; ++h) {
      for (int64_t d = 0; d < q.dim; ++d) q.set(0, h, d, next_queries_.get(0, h, d));
    }
    const TensorView query = TensorView::contiguous(q.view(config_.device).data, config_.dtype,
                                                    {q.heads, q.dim}, config_.device);
    for (const SequenceId sequence : sequences_) {
      const Explanation found = cache_.explain(0, sequence, query, {});
      outcome_.kept.push_back(found.kept);
      const auto* own = std::get_if<HardKVExplanation>(&found.details);
      outcome_.kept.push_back(own == nullptr ? std::vector<int64_t>() : own->held);
      const auto* pages = std::get_if<PRKVExplanation>(&found.details);
      if (pages == nullptr) continue;
      outcome_.kept.push_back({pages->static_rows, pages->first_page});
      outcome_.kept.push_back(pages->pages);
      outcome_.kept.push_back(found.positions);
      outcome_.page_scores.push_back(pages->page_scores);
    }
  }

  static std::string path_of_a_file() {
    return std::filesystem::temp_directory_path() /
           ("pariskv-emulated-" + std::to_string(::getpid()));
  }

  /** What a file of it has in it; the sequence goes. */
  std::string saved(SequenceId sequence) {
    cache_.save(sequence, path_of_a_file());
    cache_.remove(sequence);
    std::ifstream file(path_of_a_file(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  SequenceId loaded(const std::string& bytes) {
    std::ofstream(path_of_a_file(), std::ios::binary) << bytes;
    const SequenceId sequence = cache_.load(path_of_a_file());
    std::filesystem::remove(path_of_a_file());
    return sequence;
  }

  SequenceId saved_and_loaded(SequenceId sequence) {
    outcome_.files.push_back(saved(sequence));
    return loaded(outcome_.files.back());
  }

  /** An empty sequence. Where seeds are secret it comes from a file, so that every run of a case
   * has the same one. */
  SequenceId added(int64_t index) {
    const auto* policy = std::get_if<ParisKV>(&config_.policy);
    if (policy == nullptr || policy->seed) return cache_.add();
    static std::map<std::string, std::string> files;
    std::string& file = files[c_.name + " " + std::to_string(index)];
    if (file.empty()) file = saved(cache_.add());
    return loaded(file);
  }

  void look_at(int64_t index) {
    const Device device = config_.device;
    const SequenceId sequence = sequences_[size_t(index)];
    Tensor q = random_rows(1, Kind::kQuery);
    const TensorView query =
        TensorView::contiguous(q.view(device).data, config_.dtype, {q.heads, q.dim}, device);
    outcome_.explanations.push_back(cache_.explain(0, sequence, query, options_));
    outcome_.summaries.push_back(cache_.summaries(0, sequence));
    const int64_t dropped = cache_.regions(sequence).dropped, segment = config_.segment_tokens;
    const int64_t sinks = (cache_.config().sink + segment - 1) / segment * segment;
    const int64_t begin = dropped == 0 ? 0 : sinks + dropped;
    const int64_t length = cache_.length(sequence) - begin;
    Tensor keys = rows(length, Kind::kKey), values = rows(length, Kind::kValue);
    cache_.read(0, sequence, begin, keys.view(device), values.view(device));
    emulator::flush();
    outcome_.rows.push_back(std::move(keys));
    outcome_.rows.push_back(std::move(values));
  }

  /** The last tokens of all, as many of each as there may be: of one 5, of the next one fewer. */
  void attend() {
    if (cache_.stats().dropped_rows > 0) return;  // it needs all rows
    std::vector<Tensor> queries;
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < c_.batch; ++i) {
      lengths.push_back(std::min(c_.attended - i % 5, cache_.length(sequences_[size_t(i)])));
      queries.push_back(random_rows(lengths.back(), Kind::kQuery));
    }
    Tensor q = packed(queries, Kind::kQuery);
    const auto attended = [&](Precision precision) {
      Tensor out = rows(q.tokens, Kind::kOutput);
      options_.precision = precision;
      cache_.attend(0, sequences_, lengths, q.view(config_.device), out.view(config_.device),
                    options_);
      emulator::flush();
      return out;
    };
    outcome_.outputs.push_back(attended(Precision::kExact));
    if (c_.fast) outcome_.fast.push_back(attended(Precision::kFast));
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
  std::vector<float> lasting_lse_, lasting_errors_;
};

}  // namespace

Outcome run(const Case& c, const Config& config) { return Runner(c, config).run(); }

}  // namespace pariskv::test
