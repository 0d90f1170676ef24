// A backend without searches: every policy attends to all rows, exactly.
#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "exact_search.h"
#include "sequence.h"
#include "support.h"

namespace pariskv {
namespace {

using test::Rows;

/** The CPU's memory and attention, and the search that every backend begins with. */
class ExactBackend final : public cpu::CpuBackend {
 public:
  explicit ExactBackend(const Config& config, bool decode_appends = false)
      : CpuBackend(config, {}), decode_appends_(decode_appends) {}

  Capabilities capabilities() const override {
    Capabilities own;
    own.decode_appends = decode_appends_;
    return own;
  }
  std::unique_ptr<Search> make_search(const Config& config, const ModelShape& shape) override {
    return Backend::make_search(config, shape);
  }
  bool capturing(Stream) override { return captures; }

  bool captures = false;

 private:
  const bool decode_appends_;
};

/** One sequence of one layer on such a backend, moved on as a Cache moves it. */
struct Life {
  explicit Life(const Config& given, bool decode_appends = false)
      : config(given.resolved()),
        backend(config, decode_appends),
        search(backend.make_search(config, shape_of(config))),
        sizes{config.sink, config.local, config.update, search->needs().grain,
              search->needs().opening},
        planner(search->shape(), sizes, *search, backend, false),
        sequence(planner.create(1, 0)) {}

  Layer& layer() { return sequence.layers[0]; }
  const ModelShape& shape() const { return search->shape(); }

  void append(const SequenceView& view, int64_t begin, Rows& k, Rows& v) {
    backend.append({shape(), 1, &view, &begin, &k.tokens, k.view(), v.view()}, {});
  }

  void prefill(Rows& k, Rows& v) {
    const int64_t begin = layer().regions.total();
    Change change = planner.plan(layer(), layer().regions.prefilled(k.tokens, sizes),
                                 {Planner::Use::kStore, true}, {});
    append(change.view(sizes, *search), begin, k, v);
    change.apply();
  }

  Rows decode(Rows& q, Rows& k, Rows& v) {
    const int64_t begin = layer().regions.total();
    Change change =
        planner.plan(layer(), layer().regions.grown(1, sizes), {Planner::Use::kDecode}, {});
    const SequenceView view = change.view(sizes, *search);
    DecodeArgs args{};
    args.shape = shape();
    args.batch = 1;
    args.sequences = &view;
    Rows out(1, config.query_heads, config.value_dim, 0);
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.out = out.view();
    args.logits.scale = .125F;
    search->reserve(args);
    if (!backend.capabilities().decode_appends) append(view, begin, k, v);
    search->decode(args, {});
    change.apply();
    return out;
  }

  void truncate(int64_t tokens) {
    layer().regions = layer().regions.truncated(tokens, sizes);
    layer().store.drop(layer().regions.total(), layer().regions.sink_end(sizes),
                       layer().regions.retrieval_end(sizes));
  }

  Config config;
  ExactBackend backend;
  std::unique_ptr<Search> search;
  RegionSizes sizes;
  Planner planner;
  Sequence sequence;
};

PolicyConfig policy_of(int number) {
  HardKV kept;
  kept.most = 8;
  kept.placement = ZoneRows::kDropped;
  PRKV pages;
  pages.budget = 16;
  pages.page = 8;
  if (number == 0) return ParisKV{};
  if (number == 1) return kept;
  return pages;
}

Config config_of(int number) {
  Config config = test::small_config();
  config.policy = policy_of(number);
  config.dense_below = 0;
  return config;
}

/** Rows of the next token: q, k and v. */
struct Token {
  explicit Token(const Config& config, uint32_t seed)
      : q(1, config.query_heads, config.head_dim, seed),
        k(1, config.kv_heads, config.head_dim, seed + 1000),
        v(1, config.kv_heads, config.head_dim, seed + 2000) {}
  Rows q, k, v;
};

class ExactSearchOf : public testing::TestWithParam<int> {};

TEST_P(ExactSearchOf, NeedsNothing) {
  Life life(config_of(GetParam()));
  const Needs& needs = life.search->needs();
  EXPECT_EQ(needs.summary_bytes + needs.state_bytes + needs.tail_rows + needs.rows_per_head, 0);
  EXPECT_FALSE(needs.drops_rows);
  EXPECT_EQ(needs.grain, 1);
  EXPECT_EQ(life.shape().recent + life.shape().cached_rows, 0);
  EXPECT_EQ(life.search->kept_rows(10'000), 0);
  EXPECT_EQ(life.search->scratch_bytes(), 0);
}

/** The bits of `attend` of a cache whose sequence has the same rows. */
TEST_P(ExactSearchOf, AttendsToAllRowsThroughFlushesForksAndCuts) {
  const Config config = config_of(GetParam());
  Life life(config);
  Config dense = config;
  dense.policy = test::small_config().policy;  // whose zones end anywhere, as those of the life
  Cache cache(dense);
  const std::vector<SequenceId> only{cache.add()};
  uint32_t seed = 1;
  const auto prefill = [&](int64_t tokens) {
    Rows k(tokens, config.kv_heads, config.head_dim, seed++), v(k.tokens, k.heads, k.dim, seed++);
    life.prefill(k, v);
    cache.prefill(0, only, {tokens}, k.view(), v.view());
  };
  const auto decode = [&] {
    Token token(config, seed++);
    Rows expected(1, config.query_heads, config.head_dim, 0);
    cache.attend(0, only, {1}, token.q.view(), token.k.view(), token.v.view(), expected.view());
    EXPECT_EQ(life.decode(token.q, token.k, token.v).data, expected.data);
  };
  prefill(200);
  for (int i = 0; i < 40; ++i) decode();  // two flushes
  EXPECT_EQ(life.layer().regions.counts(life.sizes).retrieval, cache.regions(only[0]).retrieval);
  EXPECT_TRUE(life.layer().view(life.sizes, *life.search).dense());
  life.truncate(70);
  cache.truncate(only, Cut::drop({70}));
  for (int i = 0; i < 20; ++i) decode();
  prefill(33);
  const Sequence before = life.planner.fork(life.sequence, {});
  Token token(config, seed++);
  const Rows first = life.decode(token.q, token.k, token.v);
  life.sequence = life.planner.fork(before, {});  // the fork has not seen the step
  EXPECT_EQ(life.decode(token.q, token.k, token.v).data, first.data);
}

/** Where `append` does not come first, the search writes the token's own row. */
TEST_P(ExactSearchOf, WritesTheTokensRowWhereDecodeAppends) {
  const Config config = config_of(GetParam());
  Life appended(config), appends(config, true);
  Rows k(90, config.kv_heads, config.head_dim, 1), v(90, config.kv_heads, config.head_dim, 2);
  appended.prefill(k, v);
  appends.prefill(k, v);
  for (uint32_t i = 0; i < 30; ++i) {
    Token token(config, 10 + i);
    const Rows expected = appended.decode(token.q, token.k, token.v);
    EXPECT_EQ(appends.decode(token.q, token.k, token.v).data, expected.data);
  }
}

/** A recorded step would attend to the rows of its time for ever. */
TEST_P(ExactSearchOf, RefusesToBeRecorded) {
  Life life(config_of(GetParam()));
  Token token(life.config, 1);
  life.backend.captures = true;
  EXPECT_THROW(life.decode(token.q, token.k, token.v), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(Policies, ExactSearchOf, testing::Values(0, 1, 2), [](const auto& info) {
  return std::string(info.param == 0 ? "ParisKV" : info.param == 1 ? "HardKV" : "PRKV");
});

}  // namespace
}  // namespace pariskv
