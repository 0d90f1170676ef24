// Batches that were looked up once: as good as a list, until one of their sequences is gone.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "support.h"

namespace pariskv {
namespace {

using test::Rows;

/** Three sequences of 40, 41 and 42 tokens. */
struct Scene {
  Scene() : cache(test::small_config()) {
    for (int64_t i = 0; i < 3; ++i) {
      ids.push_back(cache.add());
      test::Driver{cache, ids.back(), uint32_t(i)}.prefill(40 + i);
    }
  }

  std::vector<float> decode(const Batch& batch, uint32_t seed) {
    const Config& config = cache.config();
    Rows q(batch.size(), config.query_heads, config.head_dim, seed), out = q;
    Rows k(batch.size(), config.kv_heads, config.head_dim, seed + 1000);
    Rows v(batch.size(), config.kv_heads, config.head_dim, seed + 2000);
    cache.decode(0, batch, q.view(), k.view(), v.view(), out.view());
    return out.data;
  }

  std::vector<float> attend(const Batch& batch, uint32_t seed) {
    const Config& config = cache.config();
    Rows q(batch.size(), config.query_heads, config.head_dim, seed), out = q;
    const std::vector<int64_t> lengths(size_t(batch.size()), 1);
    cache.attend(0, batch, lengths, q.view(), out.view());
    return out.data;
  }

  Cache cache;
  std::vector<SequenceId> ids;
};

/** What a call throws, empty for nothing. */
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST(Batch, IsTheListThatItWasMadeOf) {
  Scene scene;
  const Batch batch = scene.cache.batch({scene.ids[2], scene.ids[0]});
  EXPECT_EQ(batch.ids(), (std::vector<SequenceId>{scene.ids[2], scene.ids[0]}));
  EXPECT_EQ(batch.size(), 2);
  EXPECT_EQ(scene.cache.batch({}).size(), 0);
}

TEST(Batch, EveryCallGivesWhatItGivesForTheList) {
  Scene mine, theirs;
  const Batch batch = mine.cache.batch(mine.ids);
  const auto both = [&](const std::function<void(Scene&, const Batch&)>& call) {
    call(mine, batch);
    call(theirs, theirs.ids);
  };
  const auto same = [&](uint32_t seed) {
    EXPECT_EQ(mine.decode(batch, seed), theirs.decode(theirs.ids, seed));
  };
  for (uint32_t i = 0; i < 40; ++i) same(i);
  both([](Scene& scene, const Batch& given) {
    scene.cache.truncate(given, Cut::drop({3, 0, 9}));
    scene.cache.reorder(given, {2, 0, 0});
  });
  same(50);
  both([](Scene& scene, const Batch& given) {
    Rows k(6, 2, 64, 60), v(6, 2, 64, 61);
    scene.cache.prefill(0, given, {1, 2, 3}, k.view(), v.view());
    scene.cache.flush(given);
  });
  same(51);
  EXPECT_EQ(mine.attend(batch, 52), theirs.attend(theirs.ids, 52));
}

TEST(Batch, StaysGoodWhileOthersComeAndGo) {
  Scene mine, theirs;
  const Batch batch = mine.cache.batch({mine.ids[0], mine.ids[2]});
  const std::vector<SequenceId> list{theirs.ids[0], theirs.ids[2]};
  for (Scene* scene : {&mine, &theirs}) {
    std::vector<SequenceId> more;
    for (int i = 0; i < 100; ++i) more.push_back(scene->cache.add());
    more.push_back(scene->cache.fork(scene->ids[0]));
    scene->cache.remove(scene->ids[1]);
    for (const SequenceId id : more) scene->cache.remove(id);
    scene->cache.reorder({scene->ids[2], scene->ids[0]}, {1, 1});
  }
  EXPECT_EQ(mine.decode(batch, 1), theirs.decode(list, 1));
}

TEST(Batch, IsRefusedOnceOneOfItsOwnWasRemoved) {
  Scene scene;
  const Batch batch = scene.cache.batch({scene.ids[0], scene.ids[2]}), copy = batch;
  const Batch other = scene.cache.batch({scene.ids[0], scene.ids[1]});
  scene.cache.remove(scene.ids[2]);
  const int64_t tokens = scene.cache.stats().tokens;
  for (const Batch& stale : {batch, copy}) {
    const std::string text = thrown([&] { scene.decode(stale, 1); });
    EXPECT_TRUE(has(text, "[decode] sequences: 2 is not a sequence of this cache")) << text;
    EXPECT_FALSE(thrown([&] { scene.cache.truncate(stale, Cut::drop({1, 1})); }).empty());
    EXPECT_FALSE(thrown([&] { scene.cache.flush(stale); }).empty());
  }
  EXPECT_EQ(scene.cache.stats().tokens, tokens);
  scene.cache.add();  // a node of the same size may lie where the removed one lay
  EXPECT_FALSE(thrown([&] { scene.decode(batch, 1); }).empty());
  EXPECT_EQ(thrown([&] { scene.decode(other, 1); }), "");
}

TEST(Batch, IsRefusedInAnotherCache) {
  Scene mine, other;
  const Batch batch = mine.cache.batch(mine.ids);
  const std::string text = thrown([&] { other.decode(batch, 1); });
  EXPECT_TRUE(has(text, "[decode] sequences: expected a batch of this cache, got one of another"));
  EXPECT_FALSE(thrown([&] { other.cache.reorder(batch, {0, 1, 2}); }).empty());
  EXPECT_EQ(thrown([&] { mine.decode(batch, 1); }), "");
}

TEST(Batch, OutlivesItsCacheAndIsRefusedInTheNext) {
  auto scene = std::make_unique<Scene>();
  const Batch batch = scene->cache.batch(scene->ids);
  scene.reset();
  for (int i = 0; i < 3; ++i) {
    Scene next;
    EXPECT_TRUE(has(thrown([&] { next.decode(batch, 1); }), "got one of another"));
  }
}

TEST(Batch, IsNotMadeOfSequencesThatAreMissingOrNamedTwice) {
  Scene scene;
  EXPECT_TRUE(has(thrown([&] { scene.cache.batch({0, 9}); }), "[batch] sequences: 9 is not a"));
  EXPECT_TRUE(has(thrown([&] { scene.cache.batch({1, 1}); }), "expected each once, got 1 twice"));
}

}  // namespace
}  // namespace pariskv
