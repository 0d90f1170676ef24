// PRKV's work on zones that change, as a cache asks a backend for it: digests of pages, choices of
// kept rows. pariskv_cuda_steps prints a line of JSON for each.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "backend/backend.h"
#include "cuda_programs.h"
#include "policy/prkv/pages.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kSink = 4, kLocal = 128, kFlush = 128, kBudget = 1024, kPage = 32;

/** A sequence of a layer of 32 query heads on 8 kv heads of 128, with its rows near or far. */
class Pages {
 public:
  Pages(const std::vector<void*>& rows, Placement placement, int64_t tokens, int64_t static_pages)
      : backend_(cuda::make_backend(config(placement, static_pages), {})),
        search_(backend_->make_search(config(placement, static_pages),
                                      ModelShape::plain(8, 4, DType::kBFloat16, 128, 128, 1024))),
        shape_(search_->shape()),
        rules_{kBudget, kPage, static_pages, false},
        tokens_(tokens) {
    const int64_t segments = tokens / shape_.segment_tokens;
    const int64_t bytes = pages_of(shape_, rules_.page).bytes();
    auto* summaries = device_memory<uint8_t>(segments * bytes);
    std::vector<uint8_t*> table;
    for (int64_t s = 0; s < segments; ++s) table.push_back(summaries + s * bytes);
    view_.rows = on_device(std::vector<void*>(rows.begin(), rows.begin() + segments));
    view_.summaries = on_device(table);
    view_.total = tokens;
    view_.zone_begin = kSink;
    view_.zone_end = tokens - kLocal;
    view_.mode = StepMode::kSearched;
    view_.kept_capacity = rules_.most_kept();
    const AmendedLayout amended = amended_of(shape_, view_.kept_capacity);
    view_[Part::kKept] = device_memory<char>(amended.begin + amended.bytes());
    view_[Part::kRecent] = device_memory<char>(shape_.recent_queries().bytes());
    view_.device = on_device(std::vector<SequenceView>{view_});
    next_ = with_new_block();
    empty_.zone_begin = empty_.zone_end = kSink;
    remember(0);
  }

  void digest(int64_t tokens, cudaStream_t stream) const {
    const int64_t begin = tokens == 0 ? kSink : view_.zone_end - tokens;
    search_->enter({{view_, begin, view_.zone_end}}, {stream});
  }
  void choose(cudaStream_t stream) const {
    refresh({{empty_, view_, {tokens_ - shape_.recent, tokens_}, true}}, stream);
  }
  /** What a flush asks for, once rows have been chosen: with other queries, mostly. */
  void prepare_refresh(cudaStream_t stream) {
    choose(stream);
    remember(.9f);
  }
  void refresh(cudaStream_t stream) const { refresh({refreshed(next_)}, stream); }
  /** Of some layers in one call, which have their rows and queries from one or the other. */
  void refresh(const std::vector<KeptChange>& changes, cudaStream_t stream) const {
    search_->reserve_choice(changes);
    search_->choose(changes, {stream});
  }
  /** Another layer's, that has the same rows. */
  KeptChange another() const { return refreshed(with_new_block()); }
  double refreshed_bytes() const {
    const ZonePages pages = ZonePages::of(view_.zone_begin, view_.zone_end, rules_.page);
    const int64_t wanted = rules_.looked_at(pages.count);
    return wanted == 0 ? key_bytes(0) : double(wanted * rules_.page * 8 * 256);
  }
  double key_bytes(int64_t tokens) const {
    return double((tokens == 0 ? view_.zone_tokens() : tokens) * 8 * 256);
  }

 private:
  KeptChange refreshed(const SequenceView& next) const {
    return {view_, next, {tokens_ - shape_.recent, tokens_}, false};
  }
  SequenceView with_new_block() const {
    const AmendedLayout amended = amended_of(shape_, view_.kept_capacity);
    SequenceView view = view_;
    view[Part::kKept] = device_memory<char>(amended.begin + amended.bytes());
    view.device = on_device(std::vector<SequenceView>{view});
    return view;
  }

  static Config config(Placement placement, int64_t static_pages) {
    Config config;
    PRKV settings;
    settings.budget = kBudget, settings.page = kPage;
    settings.static_share.reset();
    if (static_pages != PRKVRules::kAuto) {
      settings.static_share = double(static_pages * kPage) / double(kBudget);
    }
    config.policy = settings;
    config.placement = placement;
    config.query_heads = 32, config.kv_heads = 8, config.head_dim = 128;
    config.device = {DeviceType::kCuda, 0};
    return config.resolved();
  }

  /** Queries of which a part is new. */
  void remember(float part) {
    std::mt19937 random(3), other(4);
    std::normal_distribution<float> normal;
    std::vector<float> numbers(size_t(shape_.recent * 32 * 128));
    for (float& x : numbers) x = std::sqrt(1 - part * part) * normal(random);
    for (float& x : numbers) x += part * normal(other);
    std::vector<uint16_t> halves;
    for (const float& x : numbers) {
      uint16_t half;
      std::copy_n(reinterpret_cast<const char*>(&x) + 2, 2, reinterpret_cast<char*>(&half));
      halves.push_back(half);
    }
    const TensorView q =
        TensorView::contiguous(on_device(halves), DType::kBFloat16, {shape_.recent, 32, 128},
                               Device{DeviceType::kCuda, 0});
    const RememberJob job{view_, tokens_ - shape_.recent, q};
    search_->remember({shape_, {0.08838835f, 0, nullptr}, 1, &job}, {});
    check(cudaDeviceSynchronize(), "remember");
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Search> search_;
  const ModelShape& shape_;
  const PRKVRules rules_;
  const int64_t tokens_;
  SequenceView view_{}, next_{}, empty_{};
};

void print(const char* verb, int64_t tokens, double microseconds, double bytes) {
  std::printf(
      "{\"verb\": \"%s\", \"batch\": 1, \"tokens\": %lld, \"microseconds\": %.3f, \"bytes\": "
      "%.0f}\n",
      verb, static_cast<long long>(tokens), microseconds, bytes);
  std::fflush(stdout);
}

}  // namespace

void time_pages(Clock& clock, const std::vector<void*>& near, const std::vector<void*>& far,
                cudaStream_t stream) {
  const auto nothing = [] {};
  const auto time = [&](auto work) { return clock.median(stream, true, nothing, work); };
  constexpr int64_t kStaticPages = 8;
  constexpr Placement kNear = Placement::kDevice, kFar = Placement::kHost;
  for (const int64_t tokens : {int64_t{32} << 10, int64_t{128} << 10}) {
    Pages here(near, kNear, tokens, kStaticPages);
    for (const int64_t some : {int64_t{0}, kFlush}) {
      const double taken = time([&] { here.digest(some, stream); });
      const double bytes = here.key_bytes(some);
      print(some == 0 ? "digest" : "digest of a flush", tokens, taken, bytes + bytes / 16);
    }
    const double bytes = here.key_bytes(0);
    print("choose", tokens, time([&] { here.choose(stream); }), bytes);
    const Pages split(near, kNear, tokens, PRKVRules::kAuto);
    split.digest(0, stream);
    print("choose, split", tokens, time([&] { split.choose(stream); }), bytes);
    Pages away(far, kFar, tokens, kStaticPages);
    here.digest(0, stream);
    away.digest(0, stream);
    print("choose, rows far", tokens, time([&] { away.choose(stream); }), bytes);
    here.prepare_refresh(stream);
    print("refresh", tokens, time([&] { here.refresh(stream); }), here.refreshed_bytes());
    away.prepare_refresh(stream);
    print("refresh, rows far", tokens, time([&] { away.refresh(stream); }), away.refreshed_bytes());
  }
  // What a flush of a model does: all layers in one call. Rows of four are distinct.
  constexpr int64_t kTokens = 32 << 10, kLayers = 32, kDistinct = 4;
  for (const auto& [rows, placement] : {std::pair{&near, kNear}, std::pair{&far, kFar}}) {
    std::vector<Pages> distinct;
    std::vector<KeptChange> layers;
    for (int64_t i = 0; i < kDistinct; ++i) {
      const auto first = rows->begin() + i * (kTokens >> 10);
      Pages& pages = distinct.emplace_back(std::vector<void*>(first, first + (kTokens >> 10)),
                                           placement, kTokens, kStaticPages);
      pages.digest(0, stream);
      pages.prepare_refresh(stream);
    }
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(distinct[size_t(i % kDistinct)].another());
    }
    print(placement == kFar ? "refresh of 32 layers, rows far" : "refresh of 32 layers", kTokens,
          time([&] { distinct[0].refresh(layers, stream); }),
          kLayers * distinct[0].refreshed_bytes());
  }
}

}  // namespace pariskv::cuda
