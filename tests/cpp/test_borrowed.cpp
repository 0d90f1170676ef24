// What a cache with borrowed rows refuses, what it takes of memory, and what forks share.
#include <functional>
#include <limits>
#include <stdexcept>

#include "borrowed_support.h"
#include "support.h"

namespace pariskv {
namespace {

using test::Cells;
using test::Lending;
using test::Packed;
using test::Twins;

constexpr Lending kHalves = {DType::kFloat16, BorrowedType::kFloat16, BorrowedType::kFloat16};

Config borrowing_config(int64_t block = 0) {
  Config config = test::lending_config(kHalves, block);
  config.borrowed = test::lent_rows(kHalves);
  return config;
}

/** The sentence that a call is refused with; empty: it was not. */
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_REFUSED(words, call)                                             \
  do {                                                                          \
    const std::string said = refusal([&] { call; });                            \
    EXPECT_NE(said.find(words), std::string::npos) << "refused with: " << said; \
  } while (0)

/** A cache, its program and a sequence of 100 tokens. */
struct Lender {
  explicit Lender(const Config& config = borrowing_config(), const Resources& resources = {})
      : cells(config, *config.borrowed, 4000), cache(config, resources), sequence(cache.add()) {
    add(sequence, 100);
  }

  std::vector<int64_t> fresh(int64_t tokens) {
    std::vector<int64_t> taken;
    for (int64_t i = 0; i < tokens; ++i) {
      taken.push_back(cells.take());
      cells.write(taken.back(), random);
    }
    return taken;
  }

  void add(SequenceId id, int64_t tokens) {
    const std::vector<int64_t> taken = fresh(tokens);
    for (int64_t l = 0; l < cache.config().layers; ++l) {
      cache.prefill_rows(l, {id}, {tokens}, cells.addresses(l, taken));
    }
    own.insert(own.end(), taken.begin(), taken.end());
  }

  /** The output of a step that appends nothing. */
  std::vector<char> look(SequenceId id, uint32_t seed = 7) {
    const Config& config = cache.config();
    Packed q(config.dtype, 1, config.query_heads, config.head_dim);
    Packed out(config.dtype, 1, config.query_heads, config.value_dim);
    q.fill(seed);
    cache.decode(0, {id}, q.view, out.view);
    return out.data;
  }

  std::mt19937 random{5};
  Cells cells;
  Cache cache;
  SequenceId sequence;
  std::vector<int64_t> own;  // cells
};

TEST(Borrowed, ConfigsThatDoNotFitAreRefused) {
  const auto with = [](const std::function<void(Config&)>& change) {
    Config config = borrowing_config();
    change(config);
    config.validate();
  };
  EXPECT_EQ(refusal([&] { with([](Config&) {}); }), "");
  EXPECT_REFUSED("[config] borrowed: expected none on cuda:0",
                 with([](Config& config) { config.device = {DeviceType::kCuda, 0}; }));
  EXPECT_REFUSED("policy HardKV", with([](Config& config) { config.policy = HardKV(); }));
  EXPECT_REFUSED("policy PRKV", with([](Config& config) { config.policy = PRKV(); }));
  EXPECT_REFUSED("[config] kv_dtype",
                 with([](Config& config) { config.kv_dtype = KVDType::kInt8; }));
  EXPECT_REFUSED("[config] borrowed.key_head_stride", with([](Config& config) {
                   config.borrowed->key_head_stride = 126;  // two less than a head
                 }));
  EXPECT_REFUSED("[config] borrowed.value_head_stride",
                 with([](Config& config) { config.borrowed->value_head_stride = 301; }));
  EXPECT_REFUSED("[config] borrowed.value_head_stride", with([](Config& config) {
                   config.borrowed->value_head_stride = std::numeric_limits<int64_t>::max() - 1;
                 }));
  EXPECT_REFUSED("[config] borrowed.key_head_stride",
                 with([](Config& config) { config.borrowed->key_head_stride = -4; }));
  EXPECT_REFUSED("[config] borrowed.key: expected q8_0 with a multiple of 32",
                 with([](Config& config) {
                   config.head_dim = 80, config.borrowed->key_head_stride = 0;
                   config.borrowed->key = BorrowedType::kQ8_0;
                 }));
  EXPECT_REFUSED("[config] borrowed.value: expected a BorrowedType",
                 with([](Config& config) { config.borrowed->value = BorrowedType(4); }));
}

TEST(Borrowed, AResolvedConfigHasItsStrides) {
  Config config = borrowing_config();
  config.borrowed = BorrowedRows{BorrowedType::kQ8_0, BorrowedType::kFloat16, 0, 0};
  const Cache cache(config);
  EXPECT_EQ(cache.config().borrowed->key_head_stride, 2 * 34);
  EXPECT_EQ(cache.config().borrowed->value_head_stride, 96 * 2);
  EXPECT_EQ(cache.config(), config.resolved());
  config.borrowed.reset();
  EXPECT_NE(cache.config(), config.resolved());
}

TEST(Borrowed, CallsThatDoNotFitAreRefusedAndChangeNothing) {
  Lender lender;
  Cache& cache = lender.cache;
  const Config& config = cache.config();
  const SequenceId id = lender.sequence;
  const std::vector<char> before = lender.look(id);
  const Stats stats = cache.stats();
  Packed q(config.dtype, 1, config.query_heads, config.head_dim);
  Packed k(config.dtype, 1, config.kv_heads, config.head_dim);
  Packed v(config.dtype, 1, config.kv_heads, config.value_dim);
  Packed out(config.dtype, 1, config.query_heads, config.value_dim);
  const std::vector<int64_t> one = lender.fresh(1);
  const RowAddresses rows = lender.cells.addresses(0, one);

  EXPECT_REFUSED("[prefill] k: expected no tensor", cache.prefill(0, {id}, {1}, k.view, v.view));
  EXPECT_REFUSED("[decode] k: expected no tensor",
                 cache.decode(0, {id}, q.view, k.view, v.view, out.view));
  EXPECT_REFUSED("[attend] k: expected no tensor",
                 cache.attend(0, {id}, {1}, q.view, k.view, v.view, out.view));
  EXPECT_REFUSED("[save]", cache.save(id, testing::TempDir() + "/pariskv_borrowed"));
  EXPECT_REFUSED("[load]", cache.load(testing::TempDir() + "/pariskv_borrowed"));

  Config copies = config;
  copies.borrowed.reset();
  Cache copying(copies);
  const SequenceId other = copying.add();
  EXPECT_REFUSED("[prefill_rows] rows", copying.prefill_rows(0, {other}, {1}, rows));
  EXPECT_REFUSED("[decode_rows] rows", copying.decode_rows(0, {other}, q.view, rows, out.view));
  EXPECT_REFUSED("[attend_rows] rows",
                 copying.attend_rows(0, {other}, {1}, q.view, rows, out.view));
  EXPECT_REFUSED("[move_rows] rows", copying.move_rows(0, {other}, {0}, {0}, {}));
  EXPECT_REFUSED("[rewrite_rows] rows", copying.rewrite_rows(0, {other}));

  RowAddresses wrong = rows;
  wrong.keys.push_back(rows.keys[0]);
  EXPECT_REFUSED("[prefill_rows] rows.keys: expected an address for each of the 1 tokens, got 2",
                 cache.prefill_rows(0, {id}, {1}, wrong));
  wrong = rows, wrong.values.clear();
  EXPECT_REFUSED("[decode_rows] rows.values", cache.decode_rows(0, {id}, q.view, wrong, out.view));
  wrong = rows, wrong.values[0] = nullptr;
  EXPECT_REFUSED("[attend_rows] rows.values[0]: expected an address, got a null pointer",
                 cache.attend_rows(0, {id}, {1}, q.view, wrong, out.view));
  wrong = rows, wrong.keys[0] = static_cast<const char*>(rows.keys[0]) + 1;
  EXPECT_REFUSED("[move_rows] rows.keys[0]: expected an address at a multiple of 2",
                 cache.move_rows(0, {id}, {4}, {1}, wrong));
  EXPECT_REFUSED("[prefill_rows] lengths", cache.prefill_rows(0, {id}, {-1}, {}));
  EXPECT_REFUSED("[prefill_rows] layer", cache.prefill_rows(2, {id}, {1}, rows));

  EXPECT_REFUSED("[move_rows] positions", cache.move_rows(0, {id}, {100}, {1}, rows));
  EXPECT_REFUSED("[move_rows] positions", cache.move_rows(0, {id}, {-1}, {1}, rows));
  EXPECT_REFUSED("[move_rows] positions",
                 cache.move_rows(0, {id}, {std::numeric_limits<int64_t>::max()}, {1}, rows));
  EXPECT_REFUSED("[move_rows] begin", cache.move_rows(0, {id}, {0, 1}, {1}, rows));
  EXPECT_REFUSED("[move_rows] lengths", cache.move_rows(0, {id}, {0}, {1, 1}, rows));
  EXPECT_REFUSED("[rewrite_rows] sequences", cache.rewrite_rows(0, {id + 7}));

  // An output where a row of the call is, of the first kv head and of the last one.
  const int64_t heads[] = {0, config.kv_heads - 1};
  for (const int64_t head : heads) {
    TensorView inside = out.view;
    inside.data = lender.cells.value(0, one[0]) + head * 96 * 2 - (out.data.size() - 2);
    EXPECT_REFUSED("[decode_rows] out: expected memory of its own, got some that is part of rows",
                   cache.decode_rows(0, {id}, q.view, rows, inside));
  }
  EXPECT_TRUE(before == lender.look(id));
  EXPECT_EQ(cache.length(id), 100);
  EXPECT_EQ(cache.stats().memory.live, stats.memory.live);
  EXPECT_EQ(cache.stats().encoded_keys, stats.encoded_keys);
}

TEST(Borrowed, IdleSlotsNeedNoAddresses) {
  Lender lender;
  Cache& cache = lender.cache;
  const Config& config = cache.config();
  const SequenceId id = lender.sequence, fork = cache.fork(id);
  const RowAddresses row = lender.cells.addresses(0, lender.fresh(1));
  Packed q(config.dtype, 3, config.query_heads, config.head_dim);
  Packed out(config.dtype, 3, config.query_heads, config.value_dim);
  q.fill(3);
  const auto part = [](const TensorView& all, int64_t lane) {
    TensorView one = all;
    one.data = static_cast<char*>(one.data) + lane * one.strides[0] * size_of(one.dtype);
    one.shape[0] = 1;
    return one;
  };
  cache.decode_rows(0, {fork}, part(q.view, 1), row, part(out.view, 1));
  const std::vector<char> expected = out.data;  // but for slots that were not written
  Packed lanes(config.dtype, 3, config.query_heads, config.value_dim);
  lanes.fill(4);
  const RowAddresses rows{{nullptr, row.keys[0], nullptr}, {nullptr, row.values[0], nullptr}};
  EXPECT_REFUSED("[decode_rows] rows.keys[0]: expected an address",
                 cache.decode_rows(0, {id, fork, kIdle}, q.view, rows, lanes.view));
  cache.decode_rows(0, {kIdle, id, kIdle}, q.view, rows, lanes.view);
  const size_t lane = out.data.size() / 3;
  EXPECT_TRUE(std::equal(lanes.data.begin() + lane, lanes.data.begin() + 2 * lane,
                         expected.begin() + lane));
  EXPECT_EQ(std::count(lanes.data.begin(), lanes.data.begin() + lane, 0), lane);
  EXPECT_EQ(std::count(lanes.data.begin() + 2 * lane, lanes.data.end(), 0), lane);
  EXPECT_EQ(cache.length(id), 101);
}

TEST(Borrowed, AForkHasAddressesOfItsOwn) {
  Lender lender;
  const SequenceId fork = lender.cache.fork(lender.sequence);
  const std::vector<char> before = lender.look(lender.sequence);
  const int64_t shared = lender.cache.stats().row_bytes;
  // The first sequence's rows move; the fork still reads the old ones.
  std::vector<int64_t> moved;
  for (const int64_t cell : lender.own) {
    moved.push_back(lender.cells.take());
    lender.cells.copy(cell, moved.back());
  }
  lender.cache.move_rows(0, {lender.sequence}, {0}, {100}, lender.cells.addresses(0, moved));
  EXPECT_GT(lender.cache.stats().row_bytes, shared);
  for (const int64_t cell : lender.own) lender.cells.give(cell);  // filled with NaN
  EXPECT_TRUE(before == lender.look(lender.sequence));
  EXPECT_FALSE(before == lender.look(fork));
  lender.cache.move_rows(0, {fork}, {0}, {100}, lender.cells.addresses(0, moved));
  EXPECT_TRUE(before == lender.look(fork));
}

TEST(Borrowed, OnlyRewriteRowsMakesSummariesAnew) {
  Lender lender;
  const auto codes = [&] { return lender.cache.summaries(0, lender.sequence).signs; };
  const auto old = codes();
  const int64_t encoded = lender.cache.stats().encoded_keys;
  for (const int64_t cell : lender.own) lender.cells.write(cell, lender.random);
  lender.look(lender.sequence);
  EXPECT_TRUE(codes() == old);
  lender.cache.rewrite_rows(0, {lender.sequence});
  EXPECT_FALSE(codes() == old);
  const int64_t zone = lender.cache.regions(lender.sequence).retrieval;
  EXPECT_EQ(lender.cache.stats().encoded_keys, encoded + zone * lender.cache.config().kv_heads);
  EXPECT_EQ(lender.cache.stats().unusable_keys, 0);
}

TEST(Borrowed, EveryAllocationMayFailAndNothingChanges) {
  using Call = std::function<void(Lender&)>;
  /** Lets `act` work on a sequence, which is there no longer if it fails. */
  const auto beside = [](Lender& lender, SequenceId other, const auto& act) {
    try {
      act(other);
    } catch (...) {
      lender.cache.remove(other);
      throw;
    }
  };
  const Call calls[] = {
      [&](Lender& lender) {
        beside(lender, lender.cache.add(), [&](SequenceId id) { lender.add(id, 90); });
      },
      [&](Lender& lender) {
        const RowAddresses moved = lender.cells.addresses(0, lender.fresh(90));
        beside(lender, lender.cache.fork(lender.sequence), [&](SequenceId fork) {
          lender.cache.move_rows(0, {lender.sequence, fork}, {5, 0}, {20, 70}, moved);
        });
      },
      [](Lender& lender) { lender.cache.rewrite_rows(0, {lender.sequence}); },
  };
  Config config = borrowing_config();
  config.segment_tokens = 1 << 17;  // blocks of their own: each is a call of the resource
  for (const Call& call : calls) {
    int refused = 0;
    for (bool failed = true; failed; ++refused) {
      auto resource = std::make_shared<test::FailingResource>();
      Resources resources;
      resources.host = resource;
      Lender lender(config, resources);
      const std::vector<char> before = lender.look(lender.sequence);
      const int64_t rows = lender.cache.stats().row_bytes;
      resource->fail_at = resource->calls + refused;
      try {
        call(lender);
        failed = false;
      } catch (const OutOfMemory&) {
        EXPECT_TRUE(before == lender.look(lender.sequence));
        EXPECT_EQ(lender.cache.length(lender.sequence), 100);
        EXPECT_EQ(lender.cache.stats().row_bytes, rows);
      }
    }
    EXPECT_GT(refused, 1);
  }
}

TEST(Borrowed, ACallThatIsStoppedChangesNothing) {
  int64_t asked = 0, stop_at = -1, stops = 0;
  Resources resources;
  resources.should_stop = [&] { return asked++ == stop_at; };
  Lender lender(borrowing_config(64), resources);
  lender.add(lender.sequence, 1100);
  const std::vector<char> before = lender.look(lender.sequence);
  const Summaries old = lender.cache.summaries(0, lender.sequence);
  for (int64_t nth = 0;; ++nth) {
    asked = 0, stop_at = nth;
    try {
      lender.cache.rewrite_rows(0, {lender.sequence});
      break;
    } catch (const Stopped&) {
      ++stops;
    }
    stop_at = -1;
    const Summaries now = lender.cache.summaries(0, lender.sequence);
    ASSERT_TRUE(now.signs == old.signs && now.means == old.means);
    ASSERT_TRUE(before == lender.look(lender.sequence));
  }
  stop_at = -1;
  EXPECT_GT(stops, 2);
  EXPECT_TRUE(before == lender.look(lender.sequence));  // the rows are the same, so all else is
}

/** The goal of the issue: at most 18 % of a float16 cache of 8 kv heads with 128 dimensions. */
TEST(Borrowed, OwnBytesAreThoseOfSummaries) {
  constexpr int64_t kTokens = 16384, kHeads = 8, kDim = 128;
  Config config;
  config.query_heads = kHeads, config.kv_heads = kHeads, config.head_dim = kDim;
  config.dtype = DType::kFloat16, config.threads = 1;
  config.borrowed = BorrowedRows{};
  Cache cache(config);
  const SequenceId sequence = cache.add();
  std::vector<uint16_t> row(kHeads * kDim, 0x3c00);  // all tokens have the same one
  const std::vector<const void*> all(kTokens, row.data());
  cache.prefill_rows(0, {sequence}, {kTokens}, {all, all});
  const double bytes = double(cache.stats().memory.live) / kTokens;
  EXPECT_LE(bytes, .18 * (kHeads * 2 * kDim * 2));
  EXPECT_EQ(cache.stats().row_bytes, kTokens * 2 * int64_t(sizeof(void*)));
  EXPECT_EQ(cache.stats().kept_bytes, 0);
}

}  // namespace
}  // namespace pariskv
