/** A long life of a cache on the fake device, and what it should hold by now. */
#pragma once

#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "exact/exact_attention.h"
#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv::test {

class Life {
 public:
  explicit Life(int seed) : Life(config_of(seed), seed) {}
  /** @param config  of small_config's model, with kLayers layers */
  Life(const Config& config, int seed) : random_(uint32_t(seed)), cache_(config) {
    std::srand(unsigned(seed));
    cuda::window_bytes() = seed % 2 == 0 ? 1 : 1 << 20;  // a segment, or all that there are
    std::filesystem::create_directory(folder_);
  }
  ~Life() { std::filesystem::remove_all(folder_); }
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  void step() {
    act_and_count();
    look();
  }

  /** One of the calls that a step makes is refused, or many of a kind. */
  void faulty_step() {
    const int64_t nth = below(60), kind = below(6);
    if (kind == 0) {
      const Faults faults(nth / 15, Call::kMemory);
      act_and_count();
    } else if (kind == 1) {
      const Faults faults(nth / 3, Call::kLaunch);
      act_and_count();
    } else {
      const Faults faults(nth);
      act_and_count();
    }
    look();
  }

  int64_t refused() const { return refused_; }
  int64_t failed() const { return failed_; }
  int64_t declined() const { return declined_; }
  Stats stats() { return cache_.stats(); }

  /**
   * Bytes that the sequences take beyond Config::bytes_per_token, on the device and in host memory:
   * once rows that were on their way have arrived.
   */
  std::pair<int64_t, int64_t> beyond_bound() {
    for (int i = 0; i < 2; ++i) {
      finish_all();
      cache_.flush(std::vector<SequenceId>{});
    }
    const Config& config = cache_.config();
    int64_t tokens = 0;
    for (const auto& [sequence, layers] : truth_) {
      size_t most = 0;
      for (const Numbers& layer : layers) most = std::max(most, layer.size());
      tokens += (int64_t(most) + config.segment_tokens - 1) / config.segment_tokens *
                config.segment_tokens;
    }
    const int64_t count = int64_t(truth_.size());
    const Stats now = cache_.stats();
    const int64_t taken = now.memory.live - now.workspace_bytes - empty_;
    return {taken - tokens * per_token_.device - count * per_sequence_.device,
            now.host_memory.live - tokens * per_token_.host - count * per_sequence_.host};
  }

  static Config config_of(int seed) {
    Config config = small_config(kLayers, 2 * kHeads, kHeads, kDim);
    config.sink = 3;
    if (seed % 5 == 0) config.local = 0;
    config.update = 24;
    std::get<ParisKV>(config.policy).top_k = 8;
    config.dense_below = 64;
    if (seed % 8 == 2) config.row_cache = 0;
    if (seed % 8 == 3) config.row_cache = 100;
    if (seed % 4 == 1) config.placement = Placement::kDevice;
    if (seed % 8 == 7) config.placement = Placement::kAuto;
    if (seed % 3 == 0) config.memory_budget = (6 << 20) + seed * 50'000;
    if (seed % 7 == 0) config.host_budget = 2 << 20;
    return config;
  }
  /** The same with rows of the zone in 8 bits. */
  static Config narrow_config_of(int seed) {
    Config config = config_of(seed);
    config.kv_dtype = KVDType::kInt8;
    return config;
  }
  /** The same with rows that are kept. */
  static Config kept_config_of(int seed) {
    Config config = config_of(seed);
    HardKV policy;
    policy.most = 30;
    policy.patience = seed % 3;
    config.policy = policy;
    config.local = 16;
    config.memory_budget /= 3;
    return config;
  }
  /** The same with pages, or without, or with nothing else. */
  static Config paged_config_of(int seed) {
    Config config = config_of(seed);
    PRKV policy;
    policy.budget = 40;
    policy.page = seed % 2 == 0 ? 8 : 16;
    constexpr std::optional<double> kShares[] = {.5, std::nullopt, 0., 1., .25};
    policy.static_share = kShares[seed % 5];
    config.policy = policy;
    config.local = 16;
    return config;
  }
  /** The same with rows that are given back. */
  static Config dropped_config_of(int seed) {
    Config config = kept_config_of(seed);
    std::get<HardKV>(config.policy).placement = ZoneRows::kDropped;
    return config;
  }

 private:
  static constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kMost = 400;
  using Numbers = std::vector<uint16_t>;  // one for each token, in all of its row

  void act_and_count() {
    try {
      act();
    } catch (const std::invalid_argument& error) {
      if (!drops() || std::string(error.what()).find("were dropped") == std::string::npos) throw;
      ++declined_;
    } catch (const OutOfMemory&) {
      ++refused_;
    } catch (const CudaError&) {
      ++failed_;
    }
  }
  void look() {
    if (cache_.sequences().size() != truth_.size()) complain("there are sequences of no call");
    for (const auto& [sequence, layers] : truth_) {
      if (chance(4)) check(sequence);
    }
  }

  bool drops() const {
    const auto* policy = std::get_if<HardKV>(&cache_.config().policy);
    return policy != nullptr && policy->placement == ZoneRows::kDropped;
  }
  bool keeps() const { return !std::holds_alternative<ParisKV>(cache_.config().policy); }
  int64_t below(int64_t count) { return int64_t(random_() % uint64_t(count)); }
  bool chance(int64_t of) { return below(of) == 0; }
  Stream stream() { return {reinterpret_cast<void*>(intptr_t(below(3)))}; }
  TensorView view(Numbers& data, int64_t tokens, int64_t heads) {
    const size_t size = size_t(std::max(tokens, int64_t{1}) * heads * kDim);
    if (data.size() < size) keep(data), data.resize(size);
    return TensorView::contiguous(data.data(), DType::kFloat16, {tokens, heads, kDim},
                                  cache_.config().device);
  }
  /** Work that is still to be done may read and write it. */
  void keep(Numbers& data) {
    if (kept_.size() > 200) finish_all(), kept_.clear();
    kept_.push_back(std::move(data));
    data = Numbers();
  }
  /** Rows of so many new tokens, each with a number of its own; V has its complement. */
  Numbers new_rows(int64_t tokens) {
    Numbers numbers;
    keep(k_), keep(v_);
    view(k_, tokens, kHeads);
    view(v_, tokens, kHeads);
    for (int64_t t = 0; t < tokens; ++t) {
      numbers.push_back(next_++);
      std::fill_n(k_.begin() + t * kHeads * kDim, kHeads * kDim, numbers.back());
      std::fill_n(v_.begin() + t * kHeads * kDim, kHeads * kDim, uint16_t(~numbers.back()));
    }
    return numbers;
  }
  static void append(Numbers& to, const Numbers& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  void check(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const Numbers& expected = truth_[sequence][size_t(layer)];
      const int64_t tokens = int64_t(expected.size());
      if (cache_.length(sequence, layer) != tokens)
        return complain("a sequence has another length");
      const int64_t dropped = cache_.regions(sequence, layer).dropped;
      const int64_t segment = cache_.config().segment_tokens;
      const int64_t first =
          dropped == 0 ? 0 : (cache_.config().sink + segment - 1) / segment * segment;
      check_rows(sequence, layer, expected, 0, first);
      check_rows(sequence, layer, expected, first + dropped, tokens);
    }
  }
  void check_rows(SequenceId sequence, int64_t layer, const Numbers& expected, int64_t begin,
                  int64_t end) {
    Numbers k, v;
    const Stream on = stream();
    const int64_t tokens = end - begin;
    cache_.read(layer, sequence, begin, view(k, tokens, kHeads), view(v, tokens, kHeads), on);
    finish(static_cast<cudaStream_t>(on.handle));
    for (int64_t t = 0; t < tokens; ++t) {
      const uint16_t key = k[size_t(t * kHeads * kDim)];
      const uint16_t value = v[size_t((t + 1) * kHeads * kDim - 1)];
      if (key == expected[size_t(begin + t)] && value == uint16_t(~key)) continue;
      return complain("token " + std::to_string(begin + t) + " of " +
                      std::to_string(expected.size()) + " has rows that are not its own");
    }
  }

  void prefill(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const int64_t tokens = 1 + below(kMost);
      const Numbers numbers = new_rows(tokens);
      PrefillOptions options;
      if (keeps() && !chance(4)) options.q = view(q_, tokens, 2 * kHeads);
      cache_.prefill(layer, {sequence}, {tokens}, view(k_, tokens, kHeads),
                     view(v_, tokens, kHeads), options, stream());
      append(truth_[sequence][size_t(layer)], numbers);
    }
  }

  void decode(const std::vector<SequenceId>& batch, Stream on) {
    const int64_t count = int64_t(batch.size());
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const Numbers numbers = new_rows(count);
      cache_.decode(layer, batch, view(q_, count, 2 * kHeads), view(k_, count, kHeads),
                    view(v_, count, kHeads), view(out_, count, 2 * kHeads), {}, on);
      for (size_t i = 0; i < batch.size(); ++i) {
        truth_[batch[i]][size_t(layer)].push_back(numbers[i]);
      }
    }
  }

  /** A turn, with its attention. */
  void attend(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const int64_t tokens = 1 + below(40);
      const Numbers numbers = new_rows(tokens);
      cache_.attend(layer, {sequence}, {tokens}, view(q_, tokens, 2 * kHeads),
                    view(k_, tokens, kHeads), view(v_, tokens, kHeads),
                    view(out_, tokens, 2 * kHeads), {}, stream());
      append(truth_[sequence][size_t(layer)], numbers);
    }
  }

  /** A layer that shares the rows of another one: nothing is appended. */
  void look_with_decode(SequenceId sequence, Stream on) {
    if (truth_[sequence][0].empty()) return;
    cache_.decode(0, {sequence}, view(q_, 1, 2 * kHeads), view(out_, 1, 2 * kHeads), {}, on);
  }

  void advance_and_replay(const std::vector<SequenceId>& batch, Stream on) {
    cache_.advance(batch, on);
    replay(batch, on);
  }

  /** Nothing of a graph that was recorded can be refused. */
  void replay(const std::vector<SequenceId>& batch, Stream on) {
    const Faults none(-1);
    captured_stream() = static_cast<cudaStream_t>(on.handle);
    decode(batch, on);
    const int64_t count = int64_t(batch.size());  // a layer that shares the rows of layer 0
    cache_.decode(0, batch, view(q_, count, 2 * kHeads), view(out_, count, 2 * kHeads), {}, on);
    captured_stream() = kCapturedStream;
  }

  /** To a file, and back as another sequence. */
  void save_and_load(SequenceId sequence) {
    const std::string path = folder_ / "saved";
    try {
      cache_.save(sequence, path);
      truth_[cache_.load(path, stream())] = truth_[sequence];
    } catch (...) {
      check_folder();
      throw;
    }
    check_folder();
  }
  /** The file that was written last, and nothing else. */
  void check_folder() {
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      if (file.path().filename() != "saved") complain("a file was left behind");
    }
  }

  int64_t shortest_layer(SequenceId sequence) {
    int64_t least = kMost;
    for (const Numbers& layer : truth_[sequence]) least = std::min(least, int64_t(layer.size()));
    return least;
  }

  void truncate(SequenceId sequence) {
    const int64_t least = shortest_layer(sequence);
    const int64_t tokens = below(1 + (chance(2) ? least : std::min(least, int64_t{40})));
    cache_.truncate({sequence}, Cut::drop({tokens}), stream());
    for (Numbers& layer : truth_[sequence]) layer.resize(layer.size() - size_t(tokens));
  }

  void fork(SequenceId sequence) {
    const int64_t least = shortest_layer(sequence);
    if (least == 0 || chance(2)) {
      const SequenceId twin = cache_.fork(sequence, stream());
      truth_[twin] = truth_[sequence];
      return;
    }
    const int64_t tokens = 1 + below(least);
    std::vector<Numbers>& twin = truth_[cache_.fork_prefix(sequence, tokens, stream())];
    twin = truth_[sequence];
    for (Numbers& layer : twin) layer.resize(size_t(tokens));
  }

  void act() {
    std::vector<SequenceId> all;
    for (const auto& [sequence, layers] : truth_) all.push_back(sequence);
    if (all.size() < 2) return void(truth_[cache_.add()].resize(size_t(kLayers)));
    const SequenceId one = all[size_t(below(int64_t(all.size())))];
    std::vector<SequenceId> batch = all;
    // Few together, or so many that they go in branches.
    batch.resize(std::min(batch.size(), size_t(chance(3) ? 12 : 3)));
    switch (below(15)) {
      case 0:
        if (all.size() < 12) truth_[cache_.add()].resize(size_t(kLayers));
        return;
      case 1:
        cache_.remove(one, stream());
        truth_.erase(one);
        return;
      case 2:
        if (all.size() < 12) fork(one);
        return;
      case 3:
        return prefill(one);
      case 4:
        return truncate(one);
      case 5:
        return cache_.flush(all, stream());
      case 6:
        cache_.reorder({all[0], all[1]}, {1, 1}, stream());
        truth_[all[0]] = truth_[all[1]];
        return;
      case 7:
        cache_.stats();
        cache_.summaries(0, one);
        if (chance(4)) cache_.trim();
        return;
      case 8:  // a graph's way: room is made, then recorded decodes run
        if (cache_.config().local == 0) return;
        return advance_and_replay(batch, stream());
      case 9:
        return attend(one);
      case 10:
        return look_with_decode(one, stream());
      case 11:
        if (all.size() < 12 && !keeps()) save_and_load(one);
        return;
      case 12: {  // lengths alone change, mostly
        const Stream on = stream();
        for (int64_t left = below(12); left > 0; --left) decode(batch, on);
        return decode(batch, stream());
      }
      default:
        return decode(batch, stream());
    }
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("pariskv-life-" + std::to_string(::getpid()));
  std::mt19937 random_;
  Numbers k_, v_, q_, out_;
  std::vector<Numbers> kept_;  // all these outlive the cache, which waits for what reads them
  Cache cache_;
  const Bytes per_token_ = cache_.config().bytes_per_token(kMost);
  const Bytes per_sequence_ =
      cache_.config().bytes_per_sequence(kMost, cache_.config().segment_tokens);
  const int64_t empty_ = cache_.stats().memory.live - cache_.stats().workspace_bytes;
  std::map<SequenceId, std::vector<Numbers>> truth_;
  uint16_t next_ = 1;
  int64_t refused_ = 0, failed_ = 0, declined_ = 0;
};

}  // namespace pariskv::test
