// Times the verbs of the CUDA backend one by one and prints a line of JSON for each.
//
// Not through the public door, which has no verbs: it makes what a cache would have on the device
// (summaries, tables, slots) and calls the launchers. bench_cuda.py runs it and shows the numbers.
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda_programs.h"
#include "kernels.h"
#include "offload.h"
#include "pariskv/codec.h"
#include "pinned.h"
#include "policy/pariskv/codec/key_statistics.h"
#include "policy/pariskv/codec/schedule.h"
#include "policy/pariskv/plan.h"
#include "runtime.h"

namespace pariskv::cuda {
namespace {

constexpr int64_t kRowSegments = 128;  // distinct ones; longer sequences use them again
constexpr int64_t kQueries = 64;       // distinct ones, by turns: steps may learn from those before

void must(cudaError_t error, const char* what) { check(error, what); }

uint16_t bfloat16(float x) {
  uint32_t bits;
  static_assert(sizeof bits == sizeof x);
  std::copy_n(reinterpret_cast<const char*>(&x), sizeof x, reinterpret_cast<char*>(&bits));
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<uint16_t> normal_numbers(int64_t count, float size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<uint16_t> numbers(static_cast<size_t>(count));
  for (uint16_t& x : numbers) x = bfloat16(normal(random));
  return numbers;
}

/** Queries (heads, 4, 128) of kv heads; those of one share a length, and heads differ in it. */
std::vector<uint16_t> queries_of(int64_t heads, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> numbers;
  for (int64_t h = 0; h < heads; ++h) {
    const float length = 1 + 0.18f * normal(random);
    for (int i = 0; i < 4 * 128; ++i) numbers.push_back(bfloat16(length * normal(random)));
  }
  return numbers;
}

struct Line {
  std::string verb, scorer;
  int64_t batch, tokens;
  double cold, warm;  // microseconds; 0: not measured
  double bytes;
  double until = 0;  // microseconds of all steps up to this one in one launch, cold
};

void print(const Line& line) {
  std::printf("{\"verb\": \"%s\", ", line.verb.c_str());
  if (!line.scorer.empty()) std::printf("\"scorer\": \"%s\", ", line.scorer.c_str());
  if (line.warm > 0) std::printf("\"warm_microseconds\": %.3f, ", line.warm);
  if (line.until > 0) std::printf("\"until_microseconds\": %.3f, ", line.until);
  std::printf("\"batch\": %lld, \"tokens\": %lld, \"microseconds\": %.3f, \"bytes\": %.0f}\n",
              static_cast<long long>(line.batch), static_cast<long long>(line.tokens), line.cold,
              line.bytes);
  std::fflush(stdout);
}

/** A layer as a cache would have it, with the sizes that the policy's paper takes. */
Config llama_layer(Scorer scorer) {
  Config config;
  config.query_heads = 32;
  config.kv_heads = 8;
  config.head_dim = 128;
  std::get<ParisKV>(config.policy).scorer = scorer;
  return config.resolved();
}

CodecConstants codec_of(const ParisKV& settings, const SummaryLayout& layout) {
  CodecConstants constants{};
  constants.layout = layout;
  const auto signs = rotation_signs(layout.rotated_dim, settings.signs_seed());
  for (size_t d = 0; d < signs.size(); ++d) {
    if (signs[d] < 0) constants.negative[d / 32] |= 1u << (d % 32);
  }
  const auto& levels = magnitude_levels();
  std::copy(levels.thresholds.begin(), levels.thresholds.end(), constants.thresholds);
  std::copy(levels.centres.begin(), levels.centres.end(), constants.centres);
  return constants;
}

/** What is the same for all that is measured: rows in both memories. */
struct RowMemory {
  std::vector<void*> near, far;  // segments on the device, and in pinned host memory

  explicit RowMemory(const ModelShape& shape) {
    const int64_t bytes = shape.row_block_bytes();
    const std::vector<uint16_t> some = normal_numbers(bytes / 2, 1.5f, 1);
    std::mt19937_64 random(2);
    char* device = device_memory<char>(kRowSegments * bytes);
    void* host = nullptr;
    must(allocate_pinned(&host, size_t(kRowSegments * bytes)), "pinned");
    for (int64_t s = 0; s < kRowSegments; ++s) {
      near.push_back(device + s * bytes);
      far.push_back(static_cast<char*>(host) + s * bytes);
      // With signs of its own, so that few keys are alike: equal ones are slow to tell apart.
      std::vector<uint16_t> own = some;
      for (size_t i = 0; i < own.size(); i += 64) {
        const uint64_t signs = random();
        for (size_t j = 0; j < 64; ++j) own[i + j] ^= uint16_t(signs >> j & 1) << 15;
      }
      must(cudaMemcpy(near.back(), own.data(), size_t(bytes), cudaMemcpyHostToDevice), "upload");
      must(cudaMemcpy(far.back(), own.data(), size_t(bytes), cudaMemcpyHostToHost), "upload");
    }
  }
};

/** Some sequences of one length, encoded, with their rows where a decode finds them. */
class Scene {
 public:
  Scene(const Config& config, const RowMemory& rows, int64_t batch, int64_t tokens)
      : settings_(std::get<ParisKV>(config.policy)),
        shape_(ModelShape::plain(8, 4, DType::kBFloat16, 128, 128, config.segment_tokens)),
        layout_{8, config.segment_tokens, 128, 0},
        batch_(batch),
        tokens_(tokens) {
    const int64_t segments = (tokens + 1 + shape_.segment_tokens - 1) / shape_.segment_tokens;
    summaries_ = device_memory<uint8_t>(batch * segments * layout_.bytes());
    const int64_t state_bytes = state_bytes_of(layout_, shape_.rows.key_dim, settings_.scorer);
    state_ = device_memory<char>(batch * state_bytes);
    for (int64_t b = 0; b < batch; ++b) {
      std::vector<void*> near, far;
      std::vector<uint8_t*> summaries;
      for (int64_t s = 0; s < segments; ++s) {
        near.push_back(rows.near[size_t((s + 17 * b) % kRowSegments)]);
        far.push_back(rows.far[size_t((s + 17 * b) % kRowSegments)]);
        summaries.push_back(summaries_ + (b * segments + s) * layout_.bytes());
      }
      // Sink, local window and half a buffer lie on the device, as they do in a cache.
      far.front() = near.front();
      for (int64_t s = segments - 2; s < segments; ++s) far[size_t(s)] = near[size_t(s)];

      SequenceView view{};
      view.total = tokens + 1;
      view.zone_begin = config.sink;
      view.zone_end = tokens - config.local - config.update / 2;
      const int64_t zone = view.zone_tokens();
      candidates_ = candidate_count(settings_, zone);
      ParisKVPlan{candidates_, schedule_step(settings_, zone).vote_ratio}.store(view);
      view[Part::kState] = state_ + b * state_bytes;
      view.summaries = on_device(summaries);
      view.rows = on_device(near);
      views_.push_back(view);
      near_.push_back(on_device(std::vector<SequenceView>{view}));
      view.rows = on_device(far);
      far_.push_back(on_device(std::vector<SequenceView>{view}));
    }
    const int64_t room = (candidates_ + 4095) / 4096 * 4096;
    Codec codec;
    codec.layout = layout_;
    ParisKVRules rules{};
    rules.codec = &codec, rules.scorer = settings_.scorer;
    rules.top_k = settings_.top_k, rules.searchers = shape_.group;
    const auto lay_out = [&](char* base) {
      return lay_out_scratch(base, shape_, rules, tokens, room);
    };
    const int64_t head_bytes = lay_out(nullptr).head_bytes, bytes = shape_.kv_heads * head_bytes;
    char* scratch = device_memory<char>(batch * bytes);
    std::vector<ParisKVSlot> slots;
    for (int64_t b = 0; b < batch; ++b) {
      slots.push_back(
          {{far_[size_t(b)]}, lay_out(scratch + b * bytes).first, head_bytes, tokens, room});
    }
    slots_ = on_device(slots);
    queries_ = on_device(queries_of(kQueries * batch * 8, 7));
    q_ = device_memory<uint16_t>(batch * 32 * 128);
    kv_ = on_device(normal_numbers(2 * batch * 8 * 128, 1.5f, 8));
    out_ = device_memory<uint16_t>(batch * 32 * 128);
    counters_ = device_memory<int64_t>(sizeof(DecodeCounts) / sizeof(int64_t));
  }

  /** The next steps have other queries. */
  void ask_anew(cudaStream_t stream) {
    const int64_t count = batch_ * 32 * 128;
    const uint16_t* next = queries_ + turn_++ % kQueries * count;
    must(cudaMemcpyAsync(q_, next, size_t(2 * count), cudaMemcpyDeviceToDevice, stream), "queries");
  }

  EncodeCall encode_call(int64_t b) const {
    const SequenceView& view = views_[size_t(b)];
    EncodeCall call{};
    call.shape = shape_;
    call.codec = codec_of(settings_, layout_);
    call.sequence = near_[size_t(b)];
    call.statistics = key_statistics(layout_, settings_.scorer, view[Part::kState]);
    call.begin = view.zone_begin;
    call.end = view.zone_end;
    return call;
  }

  void encode(cudaStream_t stream) const {
    for (int64_t b = 0; b < batch_; ++b) {
      launch_encode(encode_call(b), stream);
      launch_tally(encode_call(b), 1, stream);
    }
    must(cudaStreamSynchronize(stream), "encode");
  }

  DecodeCall decode_call(int first, int last) const {
    DecodeCall call{};
    call.shape = shape_;
    call.codec = codec_of(settings_, layout_);
    call.scorer = settings_.scorer;
    call.group_rule = settings_.group_rule;
    call.top_k = settings_.top_k;
    call.searchers = shape_.group;
    call.batch = batch_;
    call.heads = batch_ * shape_.kv_heads;
    call.slots = slots_;
    call.q = {reinterpret_cast<char*>(q_), 32 * 128, 128};
    call.k = {reinterpret_cast<char*>(kv_), 8 * 128, 128};
    call.v = {reinterpret_cast<char*>(kv_ + batch_ * 8 * 128), 8 * 128, 128};
    call.out = {reinterpret_cast<char*>(out_), 32 * 128, 128};
    call.logits = {0.08838835f, 0, nullptr};
    call.counters = counters_;
    call.first_step = first;
    call.last_step = last;
    return call;
  }

  /** Bytes that a step has to move. */
  double bytes(int step) const {
    const double heads = double(8 * batch_), zone = double(views_[0].zone_tokens());
    const double resident = double(views_[0].total) - zone;
    switch (step) {
      case kScore:
        return heads * zone * (16 + 1 + 1);
      case kRerank:
        return heads * (zone + double(candidates_) * (16 + 2 + 64) +
                        resident * double(shape_.rows.bytes()));
      case kAttend:
        return heads * double(settings_.top_k) * double(shape_.rows.bytes());
      default:
        return 0;
    }
  }

  int64_t zone_tokens() const { return views_[0].zone_tokens(); }
  const ModelShape& shape() const { return shape_; }

 private:
  const ParisKV settings_;
  const ModelShape shape_;
  const SummaryLayout layout_;  // of whole keys
  const int64_t batch_, tokens_;
  int64_t candidates_ = 0;
  std::vector<SequenceView> views_;
  std::vector<SequenceView*> near_, far_;  // on the device: rows near and far
  uint8_t* summaries_ = nullptr;
  char* state_ = nullptr;
  ParisKVSlot* slots_ = nullptr;
  uint16_t *queries_ = nullptr, *q_ = nullptr, *kv_ = nullptr, *out_ = nullptr;
  int64_t turn_ = 0;
  int64_t* counters_ = nullptr;
};

const char* name_of_step(int step) {
  static const char* const names[] = {"score", "rerank", "attend"};
  return names[step];
}

void time_steps(Clock& clock, const RowMemory& rows, Scorer scorer, int64_t batch, int64_t tokens,
                cudaStream_t stream) {
  const Config config = llama_layer(scorer);
  Scene scene(config, rows, batch, tokens);
  scene.encode(stream);
  const auto ask = [&] { scene.ask_anew(stream); };
  const auto launch = [&](int first, int last) {
    if (first <= last) launch_decode(scene.decode_call(first, last), stream);
  };
  const std::string name = scorer == Scorer::kVotes ? "votes" : "sign_norm";
  for (int step = kScore; step <= kAttend; ++step) {
    // Every round goes through all steps, so that each finds what the ones before it leave.
    const auto before = [&] {
      ask();
      launch(kScore, kAttend);
      launch(kScore, step - 1);
    };
    const double cold = clock.median(stream, true, before, [&] { launch(step, step); });
    const double until = clock.median(stream, true, ask, [&] { launch(kScore, step); });
    print({name_of_step(step), name, batch, tokens, cold, 0, scene.bytes(step), until});
  }
  const auto whole = [&] { launch(kScore, kAttend); };
  print({"all steps", name, batch, tokens, clock.median(stream, true, ask, whole),
         clock.median(stream, false, ask, whole), 0});
}

void time_encode(Clock& clock, const RowMemory& rows, Scorer scorer, cudaStream_t stream) {
  const int64_t tokens = int64_t{128} << 10;
  const Config config = llama_layer(scorer);
  const Scene scene(config, rows, 1, tokens);
  const auto nothing = [] {};
  const double keys = double(scene.zone_tokens() * 8);
  const double encode =
      clock.median(stream, true, nothing, [&] { launch_encode(scene.encode_call(0), stream); });
  const double tally =
      clock.median(stream, true, nothing, [&] { launch_tally(scene.encode_call(0), 1, stream); });
  const std::string name = scorer == Scorer::kVotes ? "votes" : "sign_norm";
  print({"encode", name, 1, tokens, encode, 0, keys * (256 + 83)});
  print({"tally", name, 1, tokens, tally, 0, keys * 17});
}

void time_offload(Clock& clock, const RowMemory& rows, const ModelShape& shape,
                  cudaStream_t stream) {
  Offload offload;
  const int64_t bytes = shape.row_block_bytes();
  const auto nothing = [] {};
  const double taken = clock.median(stream, true, nothing, [&] {
    std::vector<RowCopy> copies;
    for (int64_t s = 0; s < kRowSegments; ++s) {
      copies.push_back({rows.far[size_t(s)], rows.near[size_t(s)], bytes});
    }
    offload.wait(offload.start(copies, stream));
  });
  print({"offload", "", 1, kRowSegments * shape.segment_tokens, taken, 0,
         double(kRowSegments * bytes)});
}

void run(int rounds) {
  OwnStream stream;
  Clock clock(rounds);
  const ModelShape shape = ModelShape::plain(8, 4, DType::kBFloat16, 128, 128, 1024);
  const RowMemory rows(shape);
  for (const Scorer scorer : {Scorer::kSignNorm, Scorer::kVotes}) {
    time_encode(clock, rows, scorer, stream);
  }
  time_offload(clock, rows, shape, stream);
  time_pages(clock, rows.near, rows.far, stream);
  for (const Scorer scorer : {Scorer::kSignNorm, Scorer::kVotes}) {
    for (const int64_t tokens : {32, 128, 512, 1024}) {
      time_steps(clock, rows, scorer, 1, tokens << 10, stream);
    }
    for (const int64_t tokens : {32, 128}) {
      time_steps(clock, rows, scorer, 8, tokens << 10, stream);
    }
  }
}

}  // namespace
}  // namespace pariskv::cuda

int main(int count, char** arguments) {
  return pariskv::cuda::run_program(count, arguments, pariskv::cuda::run);
}
