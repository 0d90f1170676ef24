// PRKV's work on zones that change, on emulated GPUs and on the CPU: digests, kept rows and amended
// pages are the same bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "backend/backend.h"
#include "cases.h"
#include "machine.h"
#include "memory.h"
#include "policy/prkv/pages.h"
#include "policy/prkv/policy.h"

namespace pariskv::test {

namespace {

struct Zone {
  std::string name;
  DType dtype = DType::kBFloat16;
  int64_t key_dim = 128, value_dim = 64, kv_heads = 2, group = 4, segment_tokens = 256;
  int64_t sink = 4, tokens = 700, recent = 64;
  PRKV policy{};
  int64_t static_pages = 2;  // PRKVRules::kAuto
  int device = 1;
  Placement placement = Placement::kHost;
  bool hostile = false, equal_keys = false;
  int64_t asked = 64;  // positions whose queries are there
  int64_t least_looked_at = PRKVRules::kLeastLookedAt;

  /** The policy, with so many pages' worth of kept rows. */
  PRKV settings() const {
    PRKV own = policy;
    own.static_share.reset();
    if (static_pages != PRKVRules::kAuto) {
      own.static_share = double(static_pages * policy.page) / double(policy.budget);
    }
    return own;
  }
  PRKVRules rules() const { return {policy.budget, policy.page, static_pages, false}; }
};

Zone make(const char* name, const std::function<void(Zone&)>& change) {
  Zone zone;
  zone.name = name;
  zone.policy.budget = 128;
  zone.policy.page = 16;
  change(zone);
  return zone;
}

std::vector<Zone> zones() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  constexpr int64_t kAuto = PRKVRules::kAuto;
  return {
      make("pages_of_16", [](Zone&) {}),
      make("pages_of_8", [](Zone& z) { z.policy.page = 8, z.static_pages = 7; }),
      make("pages_of_32", [](Zone& z) { z.policy.page = 32, z.device = 0; }),
      make("pages_of_64_float32",
           [=](Zone& z) { z.policy.page = 64, z.dtype = kFloat, z.static_pages = 1; }),
      make("boxes_float16",
           [=](Zone& z) { z.policy.digest = PageDigest::kMax, z.dtype = kHalf, z.key_dim = 80; }),
      make("boxes_float32_512",
           [=](Zone& z) {
             z.policy.digest = PageDigest::kMax, z.dtype = kFloat, z.key_dim = 512;
             z.kv_heads = 1, z.group = 2;
           }),
      make("split_by_queries", [=](Zone& z) { z.static_pages = kAuto; }),
      make("split_by_queries_float32_64",
           [=](Zone& z) {
             z.static_pages = kAuto, z.dtype = kFloat, z.key_dim = 64, z.policy.page = 8;
             z.group = 3;
           }),
      make("split_by_one_query", [=](Zone& z) { z.static_pages = kAuto, z.asked = 1; }),
      make("split_of_equal_keys", [=](Zone& z) { z.static_pages = kAuto, z.equal_keys = true; }),
      make("split_by_queries_that_have_no_say",
           [=](Zone& z) { z.static_pages = kAuto, z.hostile = true; }),
      make("rows_alone", [](Zone& z) { z.static_pages = 8; }),
      make("a_zone_below_the_budget",
           [](Zone& z) { z.policy.budget = 1024, z.static_pages = 20, z.tokens = 300; }),
      make("more_rows_than_a_block_has_threads",
           [](Zone& z) {
             z.policy.budget = 2048, z.static_pages = 100, z.tokens = 2600, z.key_dim = 64;
             z.kv_heads = 1, z.group = 2, z.segment_tokens = 1024;
           }),
      make("a_group_of_twenty_96",
           [](Zone& z) { z.kv_heads = 1, z.group = 20, z.key_dim = 96, z.tokens = 300; }),
      make("a_group_of_one_256", [](Zone& z) { z.group = 1, z.key_dim = 256, z.kv_heads = 3; }),
      make("equal_keys", [](Zone& z) { z.equal_keys = true; }),
      make("hostile", [](Zone& z) { z.hostile = true; }),
      make("hostile_float32", [=](Zone& z) { z.hostile = true, z.dtype = kFloat; }),
      make("no_sink_small_segments", [](Zone& z) { z.sink = 0, z.segment_tokens = 64; }),
      make("a_sink_of_more_than_a_page", [](Zone& z) { z.sink = 35; }),
      make("best_pages_of_16", [](Zone& z) { z.least_looked_at = 0; }),
      make("best_pages_of_rows_on_the_device",
           [](Zone& z) { z.least_looked_at = 0, z.placement = Placement::kDevice; }),
      make("best_pages_of_8_float32_64",
           [=](Zone& z) {
             z.least_looked_at = 200, z.policy.page = 8, z.dtype = kFloat, z.key_dim = 64;
             z.sink = 13, z.group = 3;
           }),
      make("best_pages_of_64_boxes_float16_80",
           [=](Zone& z) {
             z.least_looked_at = 1, z.policy.page = 64, z.policy.digest = PageDigest::kMax;
             z.dtype = kHalf, z.key_dim = 80, z.static_pages = 1;
           }),
      make("best_pages_float32_512",
           [=](Zone& z) {
             z.least_looked_at = 1, z.dtype = kFloat, z.key_dim = 512, z.kv_heads = 1, z.group = 2;
           }),
      make("best_pages_256_of_a_group_of_nine",
           [](Zone& z) {
             z.least_looked_at = 1, z.key_dim = 256, z.kv_heads = 1, z.group = 9, z.tokens = 500;
           }),
      make("best_pages_split_by_queries",
           [=](Zone& z) { z.least_looked_at = 100, z.static_pages = kAuto; }),
      make("best_pages_of_more_than_a_block_has_threads",
           [](Zone& z) {
             z.least_looked_at = 1, z.policy.page = 8, z.tokens = 9000, z.key_dim = 64;
             z.kv_heads = 1, z.group = 1, z.segment_tokens = 1024, z.device = 0;
           }),
      make("best_pages_of_equal_keys", [](Zone& z) { z.least_looked_at = 1, z.equal_keys = true; }),
      make("best_pages_hostile", [](Zone& z) { z.least_looked_at = 1, z.hostile = true; }),
  };
}

/** What a zone is made of, on one backend: rows and queries are the same for both. */
class Home {
 public:
  Home(const Zone& zone, const Config& config, const ModelShape& shape)
      : zone_(zone),
        shape_(shape),
        backend_(config.device.type == DeviceType::kCuda ? cuda::make_backend(config, {})
                                                         : cpu::make_backend(config, {})),
        search_(backend_->make_search(config, shape)) {
    dynamic_cast<PRKVPolicy&>(*search_).look_at_least(zone.least_looked_at);
  }

  struct Memory {
    std::vector<Block> rows, summaries;
    std::vector<void*> row_table;
    std::vector<uint8_t*> summary_table;
    Block recent;
  };

  Block take(int64_t bytes) { return backend_->arena().allocate(bytes); }

  void begin(int64_t segments) {
    const int64_t bytes = pages_of(shape_, zone_.policy.page).bytes();
    for (int64_t s = 0; s < segments; ++s) {
      memory_.rows.push_back(take(shape_.row_block_bytes()));
      memory_.summaries.push_back(take(bytes));
      memory_.row_table.push_back(memory_.rows.back().data());
      memory_.summary_table.push_back(memory_.summaries.back().as<uint8_t>());
    }
    memory_.recent = take(shape_.recent_queries().bytes());
    std::memset(memory_.recent.data(), 0, size_t(shape_.recent_queries().bytes()));
  }

  char* row(int64_t head, int64_t position) const {
    return static_cast<char*>(memory_.row_table[size_t(position / shape_.segment_tokens)]) +
           (head * shape_.segment_tokens + position % shape_.segment_tokens) * shape_.rows.bytes();
  }

  /** A zone [sink, end), as the device has it. */
  const SequenceView& view(int64_t end, char* kept, int64_t capacity) {
    auto own = std::make_unique<SequenceView>();
    own->rows = memory_.row_table.data();
    own->summaries = memory_.summary_table.data();
    own->total = zone_.tokens;
    own->zone_begin = zone_.sink;
    own->zone_end = end;
    own->mode = StepMode::kSearched;
    (*own)[Part::kKept] = kept;
    own->kept_capacity = capacity;
    (*own)[Part::kRecent] = memory_.recent.as<char>();
    own->device = own.get();
    views_.push_back(std::move(own));
    return *views_.back();
  }

  /** A block of kept rows of a zone that ends there. */
  const SequenceView& with_block(int64_t end) {
    const int64_t capacity = std::min(end - zone_.sink, zone_.rules().most_kept());
    const AmendedLayout amended = amended_of(shape_, capacity);
    blocks_.push_back(take(amended.begin + amended.bytes()));
    return view(end, blocks_.back().as<char>(), capacity);
  }

  void digest(int64_t begin, int64_t end) {
    search_->enter({{view(end, nullptr, 0), begin, end}}, {});
    emulator::flush();
  }
  void choose(const std::vector<KeptChange>& changes) {
    search_->reserve_choice(changes);
    search_->choose(changes, {});
    emulator::flush();
  }
  void remember(Tensor& q, int64_t begin, Device device) {
    const RememberJob job{view(zone_.tokens, nullptr, 0), begin, q.view(device)};
    search_->remember({shape_, {.1f, 0, nullptr}, 1, &job}, {});
    emulator::flush();
  }

  uint8_t* summaries(int64_t segment) const { return memory_.summary_table[size_t(segment)]; }

 private:
  const Zone& zone_;
  const ModelShape& shape_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Search> search_;
  Memory memory_;
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<SequenceView>> views_;
};

bool same(const void* a, const void* b, int64_t bytes) {
  return std::memcmp(a, b, size_t(bytes)) == 0;
}

class PRKVUpkeep : public testing::TestWithParam<std::tuple<Zone, unsigned>> {
 protected:
  /** Pages that have no live rows have no digest. */
  void compare_page(const ModelShape& shape, const PageLayout& layout, void* a, void* b,
                    int64_t head, int64_t i) {
    ASSERT_EQ(*layout.live(a, head, i), *layout.live(b, head, i));
    ASSERT_EQ(*layout.unit(a, head, i), *layout.unit(b, head, i));
    if (*layout.live(a, head, i) == 0) return;
    EXPECT_TRUE(same(layout.digest(a, head, i), layout.digest(b, head, i), 4 * shape.rows.key_dim));
  }

  void compare_digests(const Zone& zone, const ModelShape& shape, const Home& cpu, const Home& gpu,
                       int64_t end) {
    const PageLayout layout = pages_of(shape, zone.policy.page);
    for (int64_t page = zone.sink / zone.policy.page; page * zone.policy.page < end; ++page) {
      SCOPED_TRACE("page " + std::to_string(page));
      const int64_t segment = page / layout.pages, slot = page % layout.pages;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        compare_page(shape, layout, cpu.summaries(segment), gpu.summaries(segment), head, slot);
      }
    }
  }

  void compare_blocks(const Zone& zone, const ModelShape& shape, const SequenceView& cpu,
                      const SequenceView& gpu) {
    const KeptLayout kept = shape.kept(cpu.kept_capacity);
    const AmendedLayout amended = amended_of(shape, cpu.kept_capacity);
    EXPECT_EQ(amended.split(cpu[Part::kKept])->rows, amended.split(gpu[Part::kKept])->rows);
    EXPECT_EQ(amended.split(cpu[Part::kKept])->pages, amended.split(gpu[Part::kKept])->pages);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      SCOPED_TRACE("head " + std::to_string(head));
      const int32_t rows = kept.counts(cpu[Part::kKept], head)[0];
      ASSERT_EQ(rows, kept.counts(gpu[Part::kKept], head)[0]);
      ASSERT_EQ(0, kept.counts(gpu[Part::kKept], head)[1]);
      EXPECT_TRUE(same(kept.positions(cpu[Part::kKept], head),
                       kept.positions(gpu[Part::kKept], head), rows * 4));
      EXPECT_TRUE(same(kept.ages(cpu[Part::kKept], head), kept.ages(gpu[Part::kKept], head), rows));
      EXPECT_TRUE(same(kept.row(cpu[Part::kKept], head, 0), kept.row(gpu[Part::kKept], head, 0),
                       rows * kept.row_bytes));
      if (!zone.rules().has_pages()) continue;
      const int64_t pages = *amended.count(cpu[Part::kKept], head);
      ASSERT_EQ(pages, *amended.count(gpu[Part::kKept], head));
      EXPECT_TRUE(same(amended.numbers(cpu[Part::kKept], head),
                       amended.numbers(gpu[Part::kKept], head), pages * 8));
      for (int64_t i = 0; i < pages; ++i) {
        SCOPED_TRACE("amended page " + std::to_string(i));
        compare_page(shape, amended.pages(), amended.digests(cpu[Part::kKept]),
                     amended.digests(gpu[Part::kKept]), head, i);
      }
    }
  }
};

TEST_P(PRKVUpkeep, EqualsTheCpu) {
  const auto& [zone, seed] = GetParam();
  emulator::begin(zone.name, seed);
  cuda::pooling() = seed % 2 == 0;
  Config config;
  config.query_heads = zone.kv_heads * zone.group, config.kv_heads = zone.kv_heads;
  config.head_dim = zone.key_dim, config.value_dim = zone.value_dim, config.dtype = zone.dtype;
  config.threads = 1;
  config.policy = zone.settings();
  ModelShape shape{};
  shape.kv_heads = zone.kv_heads, shape.group = zone.group;
  shape.dtype = zone.dtype;
  shape.rows = RowFormat::plain(zone.key_dim, zone.value_dim, zone.dtype);
  shape.segment_tokens = zone.segment_tokens;
  shape.layout = RowLayout::segments(shape.rows, zone.segment_tokens);
  shape.recent = zone.recent;
  Home cpu(zone, config, shape);
  config.device = {DeviceType::kCuda, zone.device}, config.placement = zone.placement;
  Home gpu(zone, config, shape);
  const int64_t segments = (zone.tokens + zone.segment_tokens - 1) / zone.segment_tokens;
  cpu.begin(segments), gpu.begin(segments);

  std::mt19937 random(seed + 11);
  std::normal_distribution<float> normal;
  for (int64_t h = 0; h < zone.kv_heads; ++h) {
    for (int64_t p = 0; p < zone.tokens; ++p) {
      Tensor k(zone.dtype, 1, 1, zone.key_dim), v(zone.dtype, 1, 1, zone.value_dim);
      const float length = p % 50 == 7 ? 4.f : p % 97 == 3 ? 1e-20f : 1.f;
      for (int64_t d = 0; d < zone.key_dim; ++d) {
        const float loud = d == 5 ? 30.f : 0.f;
        const float x = p % 83 == 5 ? (d % 2 == 0 ? 0.f : -0.f) : loud + length * normal(random);
        k.set(0, 0, d, zone.equal_keys ? float(d * 7 % 5 - 2) : x);
      }
      if (p % 71 == 9) k.set(0, 0, p % zone.key_dim, std::numeric_limits<float>::quiet_NaN());
      if (p % 71 == 11) k.set(0, 0, 3, -std::numeric_limits<float>::infinity());
      if (p / 32 == 3 && zone.hostile) k.set(0, 0, 2, std::numeric_limits<float>::infinity());
      v.fill([&] { return normal(random); });
      for (Home* home : {&cpu, &gpu}) {
        std::memcpy(home->row(h, p), k.view({}).data, size_t(shape.rows.key_bytes()));
        std::memcpy(home->row(h, p) + shape.rows.key_bytes(), v.view({}).data,
                    size_t(shape.rows.value_bytes()));
      }
    }
  }
  const auto remember = [&](int64_t begin, int64_t count) {
    Tensor q(zone.dtype, count, config.query_heads, zone.key_dim);
    q.fill([&] { return normal(random); });
    for (int64_t i = 0; i < count && zone.hostile; ++i) {
      q.set(i, 0, 1, std::numeric_limits<float>::quiet_NaN());
      if (i < 5) q.set(i, config.query_heads - 1, 0, std::numeric_limits<float>::infinity());
    }
    cpu.remember(q, begin, {}), gpu.remember(q, begin, config.device);
  };

  // A prompt, a flush, another, and cuts.
  const int64_t page = zone.policy.page, end = (zone.tokens - 40) / page * page;
  const int64_t first = end - 6 * page;
  cpu.digest(zone.sink, first), gpu.digest(zone.sink, first);
  compare_digests(zone, shape, cpu, gpu, first);
  // Some queries do not see the latest rows.
  remember(first + 10 - zone.asked, zone.asked);
  const Positions asked{std::max<int64_t>(first + 10 - zone.recent, 0), first + 10};
  const auto compare_after = [&](const SequenceView& of_cpu, const SequenceView& of_gpu) {
    compare_blocks(zone, shape, of_cpu, of_gpu);
  };
  const SequenceView& cpu_first = cpu.with_block(first);
  const SequenceView& gpu_first = gpu.with_block(first);
  cpu.choose({{cpu.view(zone.sink, nullptr, 0), cpu_first, asked, true}});
  gpu.choose({{gpu.view(zone.sink, nullptr, 0), gpu_first, asked, true}});
  compare_after(cpu_first, gpu_first);
  const PRKVSplit split = *amended_of(shape, gpu_first.kept_capacity).split(gpu_first[Part::kKept]);
  EXPECT_EQ(split.rows > 0,
            shape.kept(gpu_first.kept_capacity).counts(gpu_first[Part::kKept], 0)[0] > 0);
  EXPECT_EQ(split.pages < zone.policy.budget / page, split.rows > 0);
  if (!zone.hostile) EXPECT_GT(split.rows, 0) << "queries agree on nothing";

  cpu.digest(first, end), gpu.digest(first, end);
  compare_digests(zone, shape, cpu, gpu, end);
  remember(first + 10, 20);
  const Positions later{first + 30 - zone.recent, first + 30};
  // A small one and a larger one at once, and a cut: its rows are chosen anew.
  const int64_t between = first + 2 * page, cut = zone.sink + (first - zone.sink) / 2 / page * page;
  const int64_t cut_end = cut / page * page;
  std::vector<const SequenceView*> made[2];
  for (Home* home : {&cpu, &gpu}) {
    const SequenceView& before = home == &cpu ? cpu_first : gpu_first;
    std::vector<KeptChange> changes;
    auto& own = made[home == &gpu];
    for (const int64_t to : {between, end, end, cut_end}) {
      own.push_back(&home->with_block(to));
      changes.push_back({before, *own.back(), later, to == cut_end});
    }
    home->choose(changes);
  }
  for (size_t i = 0; i < made[0].size(); ++i) {
    SCOPED_TRACE("change " + std::to_string(i));
    compare_after(*made[0][i], *made[1][i]);
  }
  // After a cut, another; and from scratch, beside one that is not.
  std::vector<const SequenceView*> last[2];
  for (Home* home : {&cpu, &gpu}) {
    const bool is_gpu = home == &gpu;
    auto& own = last[is_gpu];
    std::vector<KeptChange> changes;
    own.push_back(&home->with_block(end));
    changes.push_back({*made[is_gpu].back(), *own.back(), later, false});
    own.push_back(&home->with_block(end));
    changes.push_back({*made[is_gpu].back(), *own.back(), later, true});
    home->choose(changes);
  }
  for (size_t i = 0; i < last[0].size(); ++i) compare_after(*last[0][i], *last[1][i]);
}

INSTANTIATE_TEST_SUITE_P(Zones, PRKVUpkeep,
                         testing::Combine(testing::ValuesIn(zones()), testing::Range(0u, 2u)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

void PrintTo(const Zone& zone, std::ostream* out) { *out << zone.name; }

}  // namespace

}  // namespace pariskv::test
