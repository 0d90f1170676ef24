// Pages and their table, as kernels make them: what other kernels would read, and what is left to
// the search.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cases.h"
#include "machine.h"
#include "memory.h"

namespace pariskv::test {

namespace {

constexpr int64_t kBatch = 3, kSearched = 1;

struct Shape {
  const char* name;
  DType dtype;
  int64_t kv_heads, head_dim, value_dim, segment, gap;
};

class EmulatedPages : public testing::TestWithParam<Shape> {
 protected:
  EmulatedPages() {
    cuda::pooling() = true;
    emulator::begin(std::string("pages_") + GetParam().name, 3);
  }
  ~EmulatedPages() override { emulator::flush(); }

  static Config config_of(const Shape& shape) {
    Config config;
    config.query_heads = 4 * shape.kv_heads, config.kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim, config.value_dim = shape.value_dim;
    config.dtype = shape.dtype;
    config.local = 16, config.update = 32, config.segment_tokens = shape.segment;
    config.dense_below = 500;
    config.placement = Placement::kAuto;
    config.device = {DeviceType::kCuda, 1};
    auto& policy = std::get<ParisKV>(config.policy);
    policy.top_k = 16, policy.block = 0, policy.tail = TailRule::kNone;
    return config;
  }
  Tensor rows(int64_t tokens, int64_t heads, int64_t dim, int64_t gap = 0) {
    Tensor made(config_.dtype, tokens, heads, dim, gap);
    std::normal_distribution<float> normal;
    made.fill([&] { return normal(random_); });
    return made;
  }
  /** So many tokens of each sequence; their rows are kept. */
  void prefill(const std::vector<int64_t>& counts, const std::vector<int64_t>& page_rows,
               const std::vector<int64_t>& left = {}) {
    const int64_t gap = GetParam().gap;
    int64_t all = 0;
    for (const int64_t count : counts) all += count;
    Tensor k = rows(all, config_.kv_heads, config_.head_dim, gap);
    Tensor v = rows(all, config_.kv_heads, config_.value_dim, gap);
    std::vector<int64_t> unserved;
    PrefillOptions options;
    options.page_rows = page_rows, options.unserved = &unserved;
    cache_.prefill(0, sequences_, counts, k.view(config_.device), v.view(config_.device), options);
    emulator::flush();
    EXPECT_EQ(unserved, left);
    for (size_t i = 0, first = 0; i < counts.size(); first += size_t(counts[i++])) {
      for (int64_t t = 0; t < counts[i]; ++t) note(i, k, v, int64_t(first) + t);
    }
  }
  void note(size_t sequence, const Tensor& k, const Tensor& v, int64_t token) {
    std::vector<float> row;
    for (int64_t head = 0; head < config_.kv_heads; ++head) {
      for (int64_t i = 0; i < config_.head_dim; ++i) row.push_back(k.get(token, head, i));
      for (int64_t i = 0; i < config_.value_dim; ++i) row.push_back(v.get(token, head, i));
    }
    truth_[sequence].push_back(row);
  }
  /** What other kernels would read of a sequence. */
  void expect_pages(size_t sequence, int64_t row) {
    const auto& truth = truth_[sequence];
    ASSERT_EQ(table_.lengths[row], int64_t(truth.size()));
    const TensorView k = pages_.keys(), v = pages_.values();
    const auto number = [&](const TensorView& part, int64_t t, int64_t head, int64_t i) {
      const int64_t page = table_.pages[row * table_.width + t / config_.segment_tokens];
      const int64_t at = page * part.strides[0] + t % config_.segment_tokens * part.strides[1] +
                         head * part.strides[2] + i;
      TensorView one = part;
      one.data = static_cast<char*>(part.data) + at * size_of(part.dtype);
      Tensor copy(config_.dtype, 1, 1, 1);
      std::memcpy(copy.view({}).data, one.data, size_t(size_of(part.dtype)));
      return copy.get(0, 0, 0);
    };
    for (int64_t t = 0; t < int64_t(truth.size()); ++t) {
      const float* expected = truth[size_t(t)].data();
      for (int64_t head = 0; head < config_.kv_heads; ++head) {
        for (int64_t i : {int64_t(0), config_.head_dim - 1}) {
          ASSERT_EQ(number(k, t, head, i), expected[i]) << "K of token " << t;
        }
        expected += config_.head_dim;
        for (int64_t i : {int64_t(0), config_.value_dim - 1}) {
          ASSERT_EQ(number(v, t, head, i), expected[i]) << "V of token " << t;
        }
        expected += config_.value_dim;
      }
    }
  }
  /** The output of one slot is that of the same step without pages; others were left alone. */
  void expect_output(Tensor& out, const Tensor& plain) {
    for (int64_t head = 0; head < config_.query_heads; ++head) {
      for (int64_t i = 0; i < config_.value_dim; ++i) {
        for (int64_t slot = 0; slot < kBatch; ++slot) {
          const float expected = slot == kSearched ? plain.get(slot, head, i) : 7.0f;
          ASSERT_EQ(out.get(slot, head, i), expected) << "slot " << slot << ", head " << head;
        }
      }
    }
  }
  /** The same step of a fork, without pages. */
  Tensor plain_step(Tensor& q, Tensor& k, Tensor& v) {
    std::vector<SequenceId> forks;
    for (const SequenceId id : sequences_) forks.push_back(cache_.fork(id));
    Tensor out(config_.dtype, kBatch, config_.query_heads, config_.value_dim);
    const Device device = config_.device;
    cache_.decode(0, forks, q.view(device), k.view(device), v.view(device), out.view(device));
    emulator::flush();
    for (const SequenceId id : forks) cache_.remove(id);
    return out;
  }
  Tensor sevens() {
    Tensor out(config_.dtype, kBatch, config_.query_heads, config_.value_dim);
    out.fill([] { return 7.0f; });
    return out;
  }

  std::mt19937 random_{5};
  const Config config_ = config_of(GetParam());
  Cache cache_{config_};
  const Pages pages_ = cache_.pages();
  const PageTable table_ = cache_.page_table(8, 1500);
  std::vector<SequenceId> sequences_{cache_.add(), cache_.add(), cache_.add()};
  std::vector<std::vector<float>> truth_[kBatch];
};

TEST_P(EmulatedPages, PromptsAndChunks) {
  prefill({37, 800, 300}, {4, 0, 7});
  for (const auto& [sequence, row] : {std::pair{0, 4}, {1, 0}, {2, 7}})
    expect_pages(size_t(sequence), row);
  prefill({1, 200, 65}, {1, 2, 3});
  for (int64_t i = 0; i < kBatch; ++i) expect_pages(size_t(i), i + 1);
}

TEST_P(EmulatedPages, MoreThanTheTableIsWideIsLeftAlone) {
  prefill({37, 800, 300}, {0, 1, 2});
  prefill({1, 800, 65}, {0, 1, 2}, {1});
  expect_pages(0, 0);
  EXPECT_EQ(table_.lengths[1], 0);
  expect_pages(2, 2);
}

TEST_P(EmulatedPages, EagerSteps) {
  prefill({62, 800, 300}, {0, 1, 2});
  const std::vector<int64_t> orders[] = {{}, {5, 1, 3}, {2, 0, 1}};
  for (const std::vector<int64_t>& order : orders) {
    Tensor q = rows(kBatch, config_.query_heads, config_.head_dim);
    Tensor k = rows(kBatch, config_.kv_heads, config_.head_dim, GetParam().gap);
    Tensor v = rows(kBatch, config_.kv_heads, config_.value_dim, GetParam().gap);
    const Tensor plain = plain_step(q, k, v);
    Tensor out = sevens();
    for (size_t i = 0; i < kBatch; ++i) note(i, k, v, int64_t(i));
    AttendOptions options;
    options.page_rows = order;
    options.dense = [&] {
      emulator::flush();
      for (const size_t i : {size_t(0), size_t(2)})
        expect_pages(i, order.empty() ? int64_t(i) : order[i]);
      EXPECT_EQ(table_.lengths[order.empty() ? 1 : order[1]], 0);
    };
    const Device device = config_.device;
    cache_.decode(0, sequences_, q.view(device), k.view(device), v.view(device), out.view(device),
                  options);
    emulator::flush();
    expect_output(out, plain);
  }
}

TEST_P(EmulatedPages, RecordedSteps) {
  prefill({62, 800, 300}, {0, 1, 2});
  Tensor q = rows(kBatch, config_.query_heads, config_.head_dim);
  Tensor k = rows(kBatch, config_.kv_heads, config_.head_dim);
  Tensor v = rows(kBatch, config_.kv_heads, config_.value_dim);
  Tensor out = sevens();
  const Device device = config_.device;
  int64_t calls = 0;
  AttendOptions options;
  options.dense = [&] { ++calls; };
  const emulator::Recording graph = emulator::record([&] {
    cache_.decode(0, std::vector<SequenceId>(kBatch, kIdle), q.view(device), k.view(device),
                  v.view(device), out.view(device), options,
                  {const_cast<CUstream_st*>(emulator::kRecordedStream)});
  });
  EXPECT_EQ(calls, 1);
  for (int64_t step = 0; step < 4; ++step) {
    q.take(rows(kBatch, config_.query_heads, config_.head_dim));
    k.take(rows(kBatch, config_.kv_heads, config_.head_dim));
    v.take(rows(kBatch, config_.kv_heads, config_.value_dim));
    const Tensor plain = plain_step(q, k, v);
    out.fill([] { return 7.0f; });
    for (size_t i = 0; i < kBatch; ++i) note(i, k, v, int64_t(i));
    cache_.advance(sequences_);
    emulator::replay(graph);
    emulator::flush();
    expect_pages(0, 0);
    expect_pages(2, 2);
    EXPECT_EQ(table_.lengths[1], 0);
    expect_output(out, plain);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, EmulatedPages,
    testing::Values(Shape{"float16", DType::kFloat16, 2, 64, 64, 64, 0},
                    Shape{"bfloat16_80_192", DType::kBFloat16, 1, 80, 192, 64, 3},
                    Shape{"float32_three_heads", DType::kFloat32, 3, 64, 64, 128, 0}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace

}  // namespace pariskv::test
