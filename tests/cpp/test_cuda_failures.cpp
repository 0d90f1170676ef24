// Whatever CUDA call fails, the cache is as it was, the next call works, and nothing was lost.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>

#include "cuda_support.h"
#include "memory.h"

namespace pariskv::test {

namespace {

struct State {
  std::atomic<bool> armed{false};  // pinned memory is asked for by a thread, too
  Kind kind = Kind::kMalloc;
  int64_t fail_at = 0;
  std::atomic<int64_t> calls{0}, refused{0};
  bool forever = false;
  bool launch_refused = false;  // and not asked for yet
} state;

bool refuses(Kind kind) {
  if (!state.armed || kind != state.kind) return false;
  const int64_t call = state.calls++;
  if (call != state.fail_at && !(state.forever && call > state.fail_at)) return false;
  ++state.refused;
  return true;
}

cuda::Runtime original;

cudaError_t device_malloc(void** data, size_t bytes) {
  return refuses(Kind::kMalloc) ? cudaErrorMemoryAllocation : original.malloc(data, bytes);
}

cudaError_t host_alloc(void** data, size_t bytes) {
  return refuses(Kind::kHostAlloc) ? cudaErrorMemoryAllocation : original.host_alloc(data, bytes);
}

cudaError_t map(void* data, size_t bytes, int32_t device) {
  return refuses(Kind::kMalloc) ? cudaErrorMemoryAllocation : original.map(data, bytes, device);
}

cudaError_t copy(void* target, const void* source, size_t bytes, cudaStream_t stream) {
  return refuses(Kind::kCopy) ? cudaErrorInvalidValue
                              : original.copy(target, source, bytes, stream);
}

cudaError_t copy_rows(const RowCopy* copies, int64_t count, cudaStream_t stream) {
  return refuses(Kind::kCopy) ? cudaErrorInvalidValue : original.copy_rows(copies, count, stream);
}

cudaError_t launched() {
  if (!state.launch_refused) return original.launched();
  state.launch_refused = false;
  return cudaErrorLaunchOutOfResources;
}

}  // namespace

Faults::Faults(Kind kind, int64_t nth, bool forever) {
  original = cuda::runtime();
  state.kind = kind;
  state.fail_at = nth;
  state.calls = state.refused = 0;
  state.forever = forever;
  state.launch_refused = false;
  state.armed = true;
  cuda::runtime() = {device_malloc, host_alloc, map, copy, copy_rows, launched};
}

Faults::~Faults() {
  cuda::runtime() = original;
  state.armed = false;
}

void Faults::lift() { state.armed = false; }

int64_t Faults::refused() const { return state.refused; }

}  // namespace pariskv::test

// A launch that fails has not run, so it is stopped before it is made: the linker puts these in
// place of what <<<>>> and the code call (--wrap, see CMakeLists.txt).
extern "C" {

using pariskv::test::Kind;
using pariskv::test::refuses;
using pariskv::test::state;

#if CUDART_VERSION >= 13000
cudaError_t __real___cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t);

cudaError_t __wrap___cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** arguments,
                                      size_t shared, cudaStream_t stream) {
  if (!refuses(Kind::kLaunch)) {
    return __real___cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
  }
  state.launch_refused = true;
  return cudaErrorLaunchOutOfResources;
}
#endif

cudaError_t __real_cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);

cudaError_t __wrap_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared, cudaStream_t stream) {
  if (!refuses(Kind::kLaunch)) {
    return __real_cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
  }
  state.launch_refused = true;
  return cudaErrorLaunchOutOfResources;
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  // What this returns is looked at, so nothing is left to be asked for.
  return refuses(Kind::kLaunch) ? cudaErrorLaunchOutOfResources
                                : __real_cudaLaunchKernelExC(config, kernel, arguments);
}

}  // extern "C"

namespace pariskv {
namespace {

using test::DeviceDriver;
using test::FailingResource;
using test::Faults;

/** Segments of half a megabyte: new slabs are needed again and again. */
Config device_config() {
  Config config = test::small_config();
  config.device = {DeviceType::kCuda, 0};
  config.query_heads = 8;
  config.kv_heads = 8;
  config.head_dim = 128;
  std::get<ParisKV>(config.policy).scorer = Scorer::kVotes;
  return config;
}

struct Snapshot {
  int64_t tokens, sequences, encoded, row_bytes, summary_bytes, unusable;
  RegionCounts regions;
  bool operator==(const Snapshot& other) const {
    return tokens == other.tokens && sequences == other.sequences && encoded == other.encoded &&
           row_bytes == other.row_bytes && summary_bytes == other.summary_bytes &&
           unusable == other.unusable && regions.sink == other.regions.sink &&
           regions.retrieval == other.regions.retrieval && regions.local == other.regions.local &&
           regions.buffer == other.regions.buffer;
  }
};

Snapshot snapshot(const Cache& cache, SequenceId sequence) {
  const Stats stats = cache.stats();
  return {stats.tokens,        stats.sequences,     stats.encoded_keys,     stats.row_bytes,
          stats.summary_bytes, stats.unusable_keys, cache.regions(sequence)};
}

/** What is done to a cache that holds one prompt; it leaves no other sequence behind. */
struct Deed {
  const char* name;
  std::function<void(DeviceDriver&)> act;
};

template <typename Act>
void with_another(DeviceDriver& driver, SequenceId other, Act act) {
  try {
    act();
  } catch (...) {
    Faults::lift();
    driver.cache.remove(other);
    throw;
  }
  Faults::lift();
  driver.cache.remove(other);
}

const Deed kDeeds[] = {
    {"prefill", [](DeviceDriver& driver) { driver.prefill(900); }},
    {"decode and flush", [](DeviceDriver& driver) { driver.decode(); }},
    {"flush", [](DeviceDriver& driver) { driver.cache.flush({driver.sequence}); }},
    {"fork",
     [](DeviceDriver& driver) {
       const SequenceId other = driver.cache.fork(driver.sequence);
       with_another(driver, other, [] {});
     }},
    {"fork a prefix",
     [](DeviceDriver& driver) {
       const SequenceId other = driver.cache.fork_prefix(driver.sequence, 150);
       with_another(driver, other, [&] { DeviceDriver{driver.cache, other}.prefill(40); });
     }},
    {"decode after fork",
     [](DeviceDriver& driver) {
       const SequenceId other = driver.cache.fork(driver.sequence);
       with_another(driver, other, [&] { driver.decode(); });
     }},
    {"reorder",
     [](DeviceDriver& driver) {
       const SequenceId other = driver.cache.add();
       with_another(driver, other, [&] { driver.cache.reorder({driver.sequence, other}, {0, 0}); });
     }},
    {"explain", [](DeviceDriver& driver) { driver.explain(); }},
    {"attend", [](DeviceDriver& driver) { driver.attend(); }},
    {"read", [](DeviceDriver& driver) { driver.read(); }},
    {"truncate",
     [](DeviceDriver& driver) { driver.cache.truncate({driver.sequence}, Cut::drop({90})); }},
    {"truncate and write",
     [](DeviceDriver& driver) {
       const SequenceId other = driver.cache.fork(driver.sequence);
       with_another(driver, other, [&] {
         driver.cache.truncate({other}, Cut::drop({90}));
         DeviceDriver{driver.cache, other}.prefill(40);
       });
     }},
};
constexpr int kDeedCount = int(sizeof kDeeds / sizeof kDeeds[0]);

/** A prompt and some tokens; the next one flushes and starts a segment. */
void begin(DeviceDriver& driver) {
  driver.prefill(241);
  for (int i = 0; i < 15; ++i) driver.decode();
}

void expect_typed(const std::exception& error, test::Kind kind) {
  const bool memory = kind == test::Kind::kMalloc || kind == test::Kind::kHostAlloc;
  const std::string text = error.what();
  if (memory) {
    EXPECT_NE(dynamic_cast<const OutOfMemory*>(&error), nullptr) << text;
    EXPECT_NE(text.find("[memory] asked for"), std::string::npos) << text;
  } else {
    EXPECT_NE(dynamic_cast<const CudaError*>(&error), nullptr) << text;
    EXPECT_NE(text.find("[cuda] "), std::string::npos) << text;
  }
}

/** Bits of everything that follows are those of a twin that nothing ever failed for. */
void expect_alike(DeviceDriver& driver, DeviceDriver& twin, const std::string& what) {
  ASSERT_EQ(driver.step, twin.step) << what;
  ASSERT_EQ(driver.read(), twin.read()) << what;
  const Explanation mine = driver.explain(), theirs = twin.explain();
  ASSERT_EQ(mine.searched, theirs.searched) << what;
  if (mine.searched) {
    ASSERT_EQ(std::get<ParisKVExplanation>(mine.details).coarse,
              std::get<ParisKVExplanation>(theirs.details).coarse)
        << what;
  }
  ASSERT_EQ(mine.positions, theirs.positions) << what;
  for (int i = 0; i < 20; ++i) ASSERT_EQ(driver.decode(), twin.decode()) << what << " " << i;
  ASSERT_EQ(driver.attend(), twin.attend()) << what;
}

class CudaFailures : public testing::TestWithParam<std::tuple<int, int, bool>> {};

TEST_P(CudaFailures, EveryCallInTurn) {
  PKV_NEEDS_GPU();
  const Deed& deed = kDeeds[std::get<0>(GetParam())];
  const test::Kind kind = test::kKinds[std::get<1>(GetParam())];
  const bool forever = std::get<2>(GetParam());
  bool passed = false;
  int64_t refused = 0;
  for (int64_t nth = 0; !passed; ++nth) {
    const std::string what =
        std::string(deed.name) + ", " + test::name_of_kind(kind) + " " + std::to_string(nth);
    ASSERT_LT(nth, 100) << what << ": never got through";
    Cache cache(device_config()), calm(device_config());
    DeviceDriver driver{cache, cache.add()}, twin{calm, calm.add()};
    begin(driver);
    begin(twin);
    cache.trim();  // so that memory has to be asked for
    const Snapshot before = snapshot(cache, driver.sequence);
    bool threw = false;
    {
      const Faults faults(kind, nth, forever);
      try {
        deed.act(driver);
      } catch (const std::exception& error) {
        threw = true;
        expect_typed(error, kind);
        EXPECT_GT(faults.refused(), 0) << what << ": " << error.what();
      }
      refused += faults.refused();
      passed = faults.refused() == 0;  // one that was got round, by waiting, is no end either
    }
    if (threw) {
      EXPECT_TRUE(snapshot(cache, driver.sequence) == before) << what;
      deed.act(driver);
    }
    deed.act(twin);
    expect_alike(driver, twin, what);
    cache.remove(driver.sequence);
    const Stats stats = cache.stats();
    EXPECT_EQ(stats.sequences, 0) << what;
    EXPECT_EQ(stats.row_bytes + stats.summary_bytes, 0) << what;
  }
  // A prefill takes memory of both kinds, launches, and copies rows.
  if (&deed == kDeeds) EXPECT_GT(refused, 0) << test::name_of_kind(kind) << " is never refused";
}

INSTANTIATE_TEST_SUITE_P(All, CudaFailures,
                         testing::Combine(testing::Range(0, kDeedCount), testing::Range(0, 4),
                                          testing::Bool()));

/** The Nth call of an embedder's own resource fails, of either kind of memory. */
class CudaResources : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(CudaResources, EveryRefusalInTurn) {
  PKV_NEEDS_GPU();
  const auto [pinned, forever] = GetParam();
  const int64_t none = -1;
  bool passed = false;
  int64_t failures = 0;
  for (int64_t nth = 0; !passed; ++nth) {
    ASSERT_LT(nth, 100) << "never got through";
    const auto resource = std::make_shared<FailingResource>();
    resource->upstream = pinned ? cuda::pinned_resource(0) : cuda::device_resource(0);
    Resources resources;
    (pinned ? resources.pinned : resources.device) = resource;
    {
      Cache cache(device_config(), resources), calm(device_config());
      DeviceDriver driver{cache, cache.add()}, twin{calm, calm.add()};
      begin(driver);
      begin(twin);
      const Snapshot before = snapshot(cache, driver.sequence);
      const int64_t calls = resource->calls;
      resource->fail_at = calls + nth;
      resource->forever = forever;
      const uint32_t step = driver.step;
      try {
        driver.prefill(900);
      } catch (const OutOfMemory& error) {
        ++failures;
        EXPECT_NE(std::string(error.what()).find(pinned ? "pinned host memory" : "device memory"),
                  std::string::npos)
            << error.what();
        EXPECT_TRUE(snapshot(cache, driver.sequence) == before) << nth;
      }
      passed = resource->calls <= calls + nth;  // it was never asked that often
      resource->fail_at = none;
      if (driver.step == step) driver.prefill(900);
      twin.prefill(900);
      expect_alike(driver, twin, "refusal " + std::to_string(nth));
    }
    EXPECT_EQ(resource->live, 0) << "all that was taken has been given back";
  }
  // A single refusal is got round: the arena gives back what it can spare and asks again.
  if (forever) EXPECT_GT(failures, 0) << "nothing was put to the test";
}

INSTANTIATE_TEST_SUITE_P(All, CudaResources, testing::Combine(testing::Bool(), testing::Bool()));

TEST(CudaFailures, MakingACacheMayFailToo) {
  PKV_NEEDS_GPU();
  for (int64_t nth = 0; nth < 20; ++nth) {
    const Faults faults(test::Kind::kMalloc, nth, true);
    try {
      Cache cache(device_config());
      cache.add();
      return;
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find("device memory"), std::string::npos);
    }
  }
  FAIL() << "never got through";
}

TEST(CudaCanary, DoesNotSurviveRemove) {
  PKV_NEEDS_GPU();
  // What is freed is zeroed: looked for in what the resource has handed out and never taken back.
  class Hoard : public MemoryResource {
   public:
    void* allocate(std::size_t bytes, std::size_t alignment) override {
      pieces.push_back({upstream->allocate(bytes, alignment), bytes});
      return pieces.back().first;
    }
    void deallocate(void*, std::size_t, std::size_t) noexcept override {}
    int64_t count(uint32_t pattern) const {
      int64_t found = 0;
      for (const auto& [data, bytes] : pieces) {
        std::vector<uint32_t> words(bytes / 4);
        test::must(cudaMemcpy(words.data(), data, bytes, cudaMemcpyDefault));
        for (const uint32_t word : words) found += word == pattern;
      }
      return found;
    }
    std::shared_ptr<MemoryResource> upstream;
    std::vector<std::pair<void*, std::size_t>> pieces;
  };
  const auto near = std::make_shared<Hoard>(), far = std::make_shared<Hoard>();
  near->upstream = cuda::device_resource(0);
  far->upstream = cuda::pinned_resource(0);
  Resources resources;
  resources.device = near;
  resources.pinned = far;
  const uint32_t pattern = 0x4f1db1a5;  // an ordinary float
  float canary;
  std::memcpy(&canary, &pattern, sizeof canary);
  {
    Cache cache(device_config(), resources);
    const SequenceId sequence = cache.add();
    const test::DeviceRows rows(300, 8, 128, 1);
    std::vector<float> same(rows.host.data.size(), canary);
    test::must(
        cudaMemcpy(rows.memory.data(), same.data(), rows.memory.bytes(), cudaMemcpyHostToDevice));
    cache.prefill(0, {sequence}, {300}, rows.view(), rows.view());
    test::must(cudaDeviceSynchronize());
    cache.flush({});
    EXPECT_GE(near->count(pattern) + far->count(pattern), 2 * 300 * 8 * 128);
    EXPECT_GT(far->count(pattern), 0) << "nothing has left for host memory";
    cache.remove(sequence);
    cache.trim();
    EXPECT_EQ(near->count(pattern), 0);
    EXPECT_EQ(far->count(pattern), 0);
  }
}

}  // namespace
}  // namespace pariskv
