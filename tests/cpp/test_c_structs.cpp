// C beside C++: the same bits; and structs of programs that are older than the library.
#include <gtest/gtest.h>

#include "c/structs.h"
#include "pariskv/c.h"
#include "support.h"

namespace pariskv {

namespace test {

/** A struct that had a and b at first, and has c today. */
struct Grown {
  size_t size;
  int64_t a;
  int64_t b;
  int64_t c;
};

}  // namespace test

namespace c {

template <>
struct About<test::Grown> {
  static constexpr const char* kName = "Grown";
  static constexpr size_t kFirst = 24;
};

}  // namespace c

namespace {

using test::Grown;

TEST(StructsOfC, AnOlderProgramGetsDefaultsForFieldsItDoesNotKnow) {
  const Grown missing{sizeof(Grown), -1, -2, -3};
  const Grown given{24, 1, 2, 99};  // what lies beyond an older struct is not its own
  const Grown own = c::taken("[verb] it", &given, missing);
  EXPECT_EQ(own.a, 1);
  EXPECT_EQ(own.b, 2);
  EXPECT_EQ(own.c, -3);
  const Grown today{sizeof(Grown), 1, 2, 99};
  EXPECT_EQ(c::taken("[verb] it", &today, missing).c, 99);
}

TEST(StructsOfC, NothingIsWrittenBeyondAnOlderStruct) {
  Grown place{24, 0, 0, 7};
  c::hand_out(&place, {0, 1, 2, 3});
  EXPECT_EQ(place.size, 24u);
  EXPECT_EQ(place.b, 2);
  EXPECT_EQ(place.c, 7);
  c::fill("[verb] it", &place, 24, {0, 4, 5, 6});
  EXPECT_EQ(place.b, 5);
  EXPECT_EQ(place.c, 7);
  EXPECT_EQ(place.size, 24u);
}

TEST(StructsOfC, OtherSizesAreRefused) {
  for (const size_t size : {size_t{0}, size_t{8}, size_t{16}, size_t{28}, size_t{40}, size_t(-1)}) {
    const Grown given{size, 1, 2, 3};
    EXPECT_THROW(c::taken("[verb] it", &given), std::invalid_argument) << size;
  }
}

TEST(StructsOfC, ACacheOfCGivesTheBitsOfCpp) {
  const Config config = test::small_config();
  Cache cache(config);
  test::Driver driver{cache, cache.add()};

  pariskv_config settings;
  pariskv_policy_pariskv policy;
  ASSERT_EQ(pariskv_config_init(&settings, sizeof settings), PARISKV_OK);
  ASSERT_EQ(pariskv_policy_pariskv_init(&policy, sizeof policy), PARISKV_OK);
  settings.query_heads = config.query_heads, settings.kv_heads = config.kv_heads;
  settings.head_dim = config.head_dim, settings.dtype = PARISKV_FLOAT32;
  settings.sink = config.sink, settings.local = config.local, settings.update = config.update;
  settings.dense_below = config.dense_below, settings.segment_tokens = config.segment_tokens;
  settings.threads = 1, policy.top_k = 4, policy.block = 0, settings.pariskv = &policy;
  pariskv_cache* twin = nullptr;
  ASSERT_EQ(pariskv_cache_create(&settings, nullptr, &twin), PARISKV_OK) << pariskv_last_error();
  pariskv_sequence sequence = -1;
  ASSERT_EQ(pariskv_cache_add(twin, &sequence), PARISKV_OK);
  pariskv_batch* batch = nullptr;
  ASSERT_EQ(pariskv_batch_create(twin, &sequence, 1, &batch), PARISKV_OK);
  const auto tensor = [](test::Rows& rows) {
    const int64_t shape[] = {rows.tokens, rows.heads, rows.dim};
    pariskv_tensor made;
    pariskv_tensor_init(&made, sizeof made, rows.data.data(), PARISKV_FLOAT32, 3, shape);
    return made;
  };

  driver.prefill(300, true);  // of seeds that are those of Driver
  test::Rows k(300, 2, 64, 1000), v(300, 2, 64, 2000), q(300, 4, 64, 3000);
  const int64_t lengths = 300;
  const pariskv_tensor queries = tensor(q), keys = tensor(k), values = tensor(v);
  const pariskv_prefill_options with{sizeof with, &queries, 0, 0, nullptr, nullptr};
  ASSERT_EQ(pariskv_cache_prefill(twin, 0, batch, &lengths, &keys, &values, &with, nullptr),
            PARISKV_OK)
      << pariskv_last_error();
  for (uint32_t step = 1; step < 60; ++step) {
    test::Rows qs(1, 4, 64, 3000 + step), ks(1, 2, 64, 4000 + step), vs(1, 2, 64, 5000 + step);
    test::Rows out(1, 4, 64, 0);
    const pariskv_tensor a = tensor(qs), b = tensor(ks), d = tensor(vs), o = tensor(out);
    ASSERT_EQ(pariskv_cache_decode(twin, 0, batch, &a, &b, &d, &o, nullptr, nullptr), PARISKV_OK);
    ASSERT_EQ(out.data, driver.decode()) << step;
  }
  pariskv_batch_destroy(batch);
  pariskv_cache_destroy(twin);
}

}  // namespace
}  // namespace pariskv
