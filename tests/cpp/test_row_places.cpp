// Stored rows by their places and by how they are written. The CPU computes the same bits whoever
// owns the memory that rows are in, and whatever their numbers are written as.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "cpu/cpu_backend.h"
#include "cpu/rows.h"
#include "search.h"

namespace pariskv::cpu {
namespace {

constexpr int64_t kTokens = 1160, kSink = 5, kZoneEnd = 1088, kSegment = 128;
constexpr int64_t kHeads = 2, kGroup = 3, kKeyDim = 80, kValueDim = 64;

using Bytes = std::vector<char>;

/** A tensor (tokens, heads, dim) in memory of its own. */
struct Tensor {
  Tensor(DType dtype, int64_t tokens, int64_t heads, int64_t dim)
      : data(size_t(tokens * heads * dim * size_of(dtype))),
        view(TensorView::contiguous(data.data(), dtype, {tokens, heads, dim})) {}
  Tensor(const Tensor&) = delete;

  /** Normal numbers, that are what `type` can hold. */
  void fill(uint32_t seed, RowType type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t dim = view.shape[2];
    std::vector<float> row(static_cast<size_t>(dim));
    std::vector<char> half(size_t(half_bytes(type, dim)));
    for (int64_t i = 0; i < view.shape[0] * view.shape[1]; ++i) {
      for (float& x : row) x = normal(random);
      write_half(row.data(), dim, type, half.data());
      plain_kernels().to_float(half.data(), type, dim, row.data());
      write_half(row.data(), dim, row_type(view.dtype),
                 data.data() + i * dim * size_of(view.dtype));
    }
  }

  Bytes data;
  TensorView view;
};

/** Memory of rows, as the table of a sequence has it. */
struct RowMemory {
  std::vector<Bytes> blocks;
  std::vector<void*> table;
};

/** What a cache owns: segments of whole rows. */
RowMemory segments(const ModelShape& shape) {
  RowMemory memory;
  for (int64_t s = 0; s * kSegment < kTokens; ++s) {
    memory.blocks.emplace_back(size_t(shape.row_block_bytes()));
    memory.table.push_back(memory.blocks.back().data());
  }
  return memory;
}

/**
 * What a host may own: keys and values in two pools of blocks of 16 tokens, in no order. Keys are
 * (blocks, tokens, heads), and values (blocks, heads, tokens) with a gap after each.
 */
constexpr int64_t kBlock = 16, kBlocks = (kTokens + kBlock - 1) / kBlock, kGap = 12;

RowLayout host_layout(const RowFormat& rows) {
  const int64_t key = rows.key_bytes(), value = rows.value_bytes() + kGap;
  return {kBlock, 2, {0, 8, key, kHeads * key}, {1, 0, kBlock * value, value}};
}

RowMemory host_pools(const ModelShape& shape) {
  const int64_t keys = 8 + kHeads * kBlock * shape.rows.key_bytes();
  const int64_t values = kHeads * kBlock * (shape.rows.value_bytes() + kGap);
  RowMemory memory;
  memory.blocks.emplace_back(size_t(kBlocks * keys));
  memory.blocks.emplace_back(size_t(kBlocks * values));
  std::vector<int64_t> numbers(kBlocks);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), std::mt19937(5));
  for (const int64_t number : numbers) {
    memory.table.push_back(memory.blocks[0].data() + number * keys);
    memory.table.push_back(memory.blocks[1].data() + number * values);
  }
  return memory;
}

struct Policy {
  const char* name;
  PolicyConfig settings;
};

std::vector<Policy> policies() {
  ParisKV blocks, votes;
  blocks.top_k = votes.top_k = 20;
  blocks.tail = TailRule::kSample, blocks.tail_rows = 16;
  votes.scorer = Scorer::kVotes;
  HardKV hard;
  hard.most = 60;
  PRKV pages;
  pages.budget = 128, pages.page = 16, pages.static_share = .5;
  return {{"pariskv", blocks}, {"pariskv_votes", votes}, {"hardkv", hard}, {"prkv", pages}};
}

/** What came of a run: bytes of stored rows are apart, they depend on how rows are written. */
struct Outcome {
  std::vector<Bytes> computed, rows;
};

/** A sequence through all verbs of the CPU that read or write its rows. */
class Life {
 public:
  Life(const Policy& policy, DType dtype, const RowFormat& rows, bool hosted)
      : config_(config_of(policy, dtype)),
        backend_(cpu::make_backend(config_, {})),
        search_(backend_->make_search(
            config_, {kHeads, kGroup, dtype, rows, kSegment,
                      hosted ? host_layout(rows) : RowLayout::segments(rows, kSegment)})),
        shape_(search_->shape()),
        needs_(search_->needs()),
        memory_(hosted ? host_pools(shape_) : segments(shape_)) {}

  /** @param key, value  what the numbers of new rows can be written as */
  Outcome run(RowType key, RowType value) {
    Tensor k(shape_.dtype, kTokens, kHeads, kKeyDim), v(shape_.dtype, kTokens, kHeads, kValueDim);
    Tensor q(shape_.dtype, kTokens, kHeads * kGroup, kKeyDim);
    k.fill(1, key), v.fill(2, value), q.fill(3, RowType::kBFloat16);
    view_.rows = memory_.table.data();
    view_.total = kTokens, view_.zone_begin = kSink, view_.zone_end = kZoneEnd;
    view_.tail_seed = needs_.tail_seed.value_or(0);
    const int64_t begin = 0, tokens = kTokens;
    backend_->append({shape_, 1, &view_, &begin, &tokens, k.view, v.view}, {});
    Tensor k_out(shape_.dtype, kTokens, kHeads, kKeyDim);
    Tensor v_out(shape_.dtype, kTokens, kHeads, kValueDim);
    backend_->read({shape_, 1, &view_, &begin, &tokens, k_out.view, v_out.view}, {});
    EXPECT_EQ(k_out.data, k.data);
    EXPECT_EQ(v_out.data, v.data);

    for (int64_t s = 0; s * kSegment < kTokens; ++s)
      summaries_.push_back(take(needs_.summary_bytes));
    std::vector<uint8_t*> table;
    for (Bytes& segment : summaries_) table.push_back(reinterpret_cast<uint8_t*>(segment.data()));
    view_.summaries = table.data();
    state_ = take(needs_.state_bytes), view_[Part::kState] = state_.data();
    EXPECT_TRUE(search_->plan(view_));
    view_.mode = needs_.steps.selects ? StepMode::kSearched : StepMode::kKept;
    search_->enter({{view_, kSink, kZoneEnd}}, {});
    keep(q);
    copy_tail();
    attend(q);
    decode(q);
    for (const Bytes& segment : summaries_) outcome_.computed.push_back(segment);
    outcome_.computed.push_back(state_);
    return outcome_;
  }

 private:
  static Config config_of(const Policy& policy, DType dtype) {
    Config config;
    config.query_heads = kHeads * kGroup, config.kv_heads = kHeads;
    config.head_dim = kKeyDim, config.value_dim = kValueDim, config.dtype = dtype;
    config.dense_below = 0, config.threads = 1, config.segment_tokens = kSegment;
    config.policy = policy.settings;
    return config.resolved();
  }

  static Bytes take(int64_t bytes) { return Bytes(static_cast<size_t>(bytes)); }

  Logits logits() const { return {.1f, 0, nullptr}; }

  void keep(const Tensor& q) {
    const int64_t capacity = search_->kept_rows(view_.zone_tokens());
    if (capacity == 0) return;
    recent_ = take(shape_.recent_queries().bytes()), view_[Part::kRecent] = recent_.data();
    TensorView last = q.view;
    const int64_t first = kTokens - shape_.recent;
    last.data = element_at(q.view, first, 0), last.shape[0] = shape_.recent;
    const RememberJob job{view_, first, last};
    search_->remember({shape_, logits(), 1, &job}, {});
    KeptChange change{view_, view_, {first, kTokens}, true};
    const KeptLayout layout = shape_.kept(capacity);
    kept_ = take(layout.bytes() + search_->bytes_beside_kept(capacity));
    view_[Part::kKept] = kept_.data(), view_.kept_capacity = capacity;
    change.after = view_;
    search_->reserve_choice({change});
    search_->choose({change}, {});
    for (int64_t head = 0; head < kHeads; ++head) {
      const int32_t* counts = layout.counts(kept_.data(), head);
      EXPECT_GT(counts[0], 0);
      const char* positions = reinterpret_cast<char*>(layout.positions(kept_.data(), head));
      outcome_.computed.emplace_back(positions, positions + 4 * (counts[0] + counts[1]));
    }
    outcome_.rows.push_back(kept_);
  }

  void copy_tail() {
    if (needs_.tail_rows == 0) return;
    const Tail tail = Tail::of(kSink, kZoneEnd, needs_.tail_rows, *needs_.tail_seed);
    tail_ = take(shape_.tail_copies(Tail::capacity(needs_.tail_rows)).bytes());
    view_[Part::kTailCopies] = tail_.data();
    const TailCopyJob job{view_, tail, 0};
    search_->copy_tail_rows({shape_, 1, &job}, {});
    outcome_.rows.push_back(tail_);
  }

  void attend(const Tensor& q) {
    Tensor out(shape_.dtype, kTokens, kHeads * kGroup, kValueDim);
    Tensor lse(DType::kFloat32, kTokens, kHeads * kGroup, 1);
    TensorView lse_view =
        TensorView::contiguous(lse.data.data(), DType::kFloat32, {kTokens, kHeads * kGroup});
    const std::vector<int64_t> none;
    const int64_t tokens = kTokens;
    backend_->attend_exact(
        {shape_, 1, &view_, &tokens, &none, q.view, logits(), out.view, lse_view}, {});
    outcome_.computed.push_back(out.data);
    outcome_.computed.push_back(lse.data);

    const std::vector<int32_t> positions = {0, 17, 899, 400, -1, 16};
    std::vector<float> own(size_t(kHeads * kGroup * 3));
    Tensor one(shape_.dtype, 1, kHeads * kGroup, kKeyDim);
    one.fill(7, RowType::kBFloat16);
    backend_->exact_logits({shape_, view_, one.view, logits(), positions.data(), 3, own.data()},
                           {});
    const char* bytes = reinterpret_cast<const char*>(own.data());
    outcome_.computed.emplace_back(bytes, bytes + own.size() * sizeof(float));
  }

  void decode(const Tensor& q) {
    Tensor out(shape_.dtype, 1, kHeads * kGroup, kValueDim);
    DecodeArgs args{};
    args.shape = shape_, args.batch = 1, args.sequences = &view_, args.logits = logits();
    args.q = q.view, args.q.shape[0] = 1, args.out = out.view;
    search_->reserve(args);
    search_->decode(args, {});
    outcome_.computed.push_back(out.data);
  }

  const Config config_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<Search> search_;
  const ModelShape& shape_;
  const Needs& needs_;
  RowMemory memory_;
  SequenceView view_{};
  std::vector<Bytes> summaries_;
  Bytes state_, recent_, kept_, tail_;
  Outcome outcome_;
};

class RowPlaces : public testing::TestWithParam<Policy> {};

TEST_P(RowPlaces, RowsOfAHostGiveTheBitsOfOurSegments) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const RowFormat rows = RowFormat::plain(kKeyDim, kValueDim, dtype);
    const Outcome ours = Life(GetParam(), dtype, rows, false).run(rows.key, rows.value);
    const Outcome hosted = Life(GetParam(), dtype, rows, true).run(rows.key, rows.value);
    EXPECT_TRUE(ours.computed == hosted.computed) << name_of(dtype);
    EXPECT_TRUE(ours.rows == hosted.rows) << name_of(dtype);
    const Bytes nothing(ours.computed[0].size());
    EXPECT_FALSE(ours.computed[0] == nothing) << name_of(dtype);
  }
}

/** Each of K and V may be of another type than tensors: numbers that fit both are the same bits. */
TEST_P(RowPlaces, NumbersThatFitAFormatGiveTheSameBitsInIt) {
  constexpr DType kWide = DType::kFloat32;
  const RowFormat plain = RowFormat::plain(kKeyDim, kValueDim, kWide);
  const RowFormat formats[] = {
      {kKeyDim, kValueDim, RowType::kFloat16, RowType::kBFloat16},
      {kKeyDim, kValueDim, RowType::kBFloat16, RowType::kFloat32},
      {kKeyDim, kValueDim, RowType::kFloat32, RowType::kFloat16},
      {kKeyDim, kValueDim, RowType::kInt8, RowType::kInt8},
      {kKeyDim, kValueDim, RowType::kInt8, RowType::kBFloat16},
      {kKeyDim, kValueDim, RowType::kQ8_0, RowType::kQ8_0},
  };
  for (const RowFormat& format : formats) {
    const Outcome whole = Life(GetParam(), kWide, plain, false).run(format.key, format.value);
    const Outcome stored = Life(GetParam(), kWide, format, false).run(format.key, format.value);
    const Outcome hosted = Life(GetParam(), kWide, format, true).run(format.key, format.value);
    SCOPED_TRACE(testing::Message() << int(format.key) << "/" << int(format.value));
    EXPECT_TRUE(whole.computed == stored.computed);
    EXPECT_TRUE(stored.computed == hosted.computed);
    EXPECT_TRUE(stored.rows == hosted.rows);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RowPlaces, testing::ValuesIn(policies()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(RowFormat, PlainRowsAreTheNumbersAlone) {
  const RowFormat rows = RowFormat::plain(80, 64, DType::kBFloat16);
  EXPECT_TRUE(rows.is_plain(DType::kBFloat16));
  EXPECT_FALSE(rows.is_plain(DType::kFloat16));
  EXPECT_EQ(rows.key_bytes(), 160);
  EXPECT_EQ(rows.value_bytes(), 128);
  EXPECT_EQ(rows.bytes(), 288);
  const RowFormat mixed{80, 64, RowType::kFloat32, RowType::kFloat16};
  EXPECT_EQ(mixed.bytes(), 320 + 128);
  EXPECT_FALSE(mixed.is_plain(DType::kFloat32));
}

TEST(RowFormat, RowsInEightBitsHaveAScalePerHalf) {
  const RowFormat rows{128, 128, RowType::kInt8, RowType::kInt8};
  EXPECT_EQ(rows.key_bytes(), 132);
  EXPECT_EQ(rows.bytes(), 264);
  const RowFormat apart{80, 64, RowType::kInt8, RowType::kFloat16};
  EXPECT_EQ(apart.bytes(), 84 + 128);
}

TEST(RowFormat, EightBitsAreWithinHalfALevelAndStayWhenWrittenAgain) {
  constexpr int64_t kDim = 64;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const RowFormat rows{kDim, kDim, RowType::kInt8, RowType::kInt8};
  for (int i = 0; i < 1000; ++i) {
    float numbers[kDim], back[kDim];
    const float size = std::exp(normal(random) * 20);
    float largest = 0;
    for (float& x : numbers) {
      x = normal(random) * size;
      largest = std::max(largest, std::fabs(x));
    }
    Bytes half(size_t(rows.key_bytes())), again = half;
    write_half(numbers, kDim, RowType::kInt8, half.data());
    plain_kernels().to_float(half.data(), RowType::kInt8, kDim, back);
    for (int64_t d = 0; d < kDim; ++d) {
      EXPECT_LE(std::fabs(back[d] - numbers[d]), largest / 127 * 0.5001f);
    }
    write_half(back, kDim, RowType::kInt8, again.data());
    EXPECT_TRUE(half == again);
  }
}

TEST(RowFormat, EightBitsOfHostileNumbers) {
  constexpr int64_t kDim = 16;
  const float most = std::numeric_limits<float>::max();
  const auto stored = [](float special, float other) {
    std::vector<float> numbers(kDim, other);
    numbers[5] = special;
    Bytes half(size_t(half_bytes(RowType::kInt8, kDim)));
    write_half(numbers.data(), kDim, RowType::kInt8, half.data());
    plain_kernels().to_float(half.data(), RowType::kInt8, kDim, numbers.data());
    return numbers;
  };
  for (const float special : {NAN, INFINITY, -INFINITY}) {
    for (const float x : stored(special, 1)) EXPECT_FALSE(std::isfinite(x));
  }
  for (const float x : stored(0, 0)) EXPECT_EQ(x, 0);
  for (const float x : stored(1e-45f, 0)) EXPECT_LE(std::fabs(x), 1e-45f);
  for (const float special : {most, -most}) {
    for (const float x : stored(special, most / 3)) EXPECT_TRUE(std::isfinite(x));
    EXPECT_NEAR(stored(special, 0)[5] / special, 1, 1e-6);
  }
}

TEST(RowFormat, BlocksOfQ8AreFloat16ScalesAndTheirNumbers) {
  EXPECT_EQ(half_bytes(RowType::kQ8_0, 128), 4 * 34);
  EXPECT_EQ(half_bytes(RowType::kQ8_0, 80), 3 * 34);
  // Two blocks by hand, as ggml writes them: scales of 0.5 and of -2.
  std::vector<uint8_t> half(68);
  half[1] = 0x38, half[35] = 0xc0;
  half[2 + 3] = 7, half[2 + 31] = 0x80, half[36] = 0xff, half[36 + 31] = 127;
  float numbers[64];
  plain_kernels().to_float(half.data(), RowType::kQ8_0, 64, numbers);
  EXPECT_EQ(numbers[0], 0);
  EXPECT_EQ(numbers[3], 3.5f);
  EXPECT_EQ(numbers[31], -64);
  EXPECT_EQ(numbers[32], 2);
  EXPECT_EQ(numbers[63], -254);
}

TEST(RowFormat, BlocksOfQ8AreWithinHalfALevelAndStayWhenWrittenAgain) {
  constexpr int64_t kDim = 64;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 1000; ++i) {
    float numbers[kDim], back[kDim];
    const float size = std::ldexp(1.0f, i % 20 - 4);  // scales are normal float16 numbers
    for (float& x : numbers) x = normal(random) * size;
    if (i % 10 == 9) numbers[40] = i % 20 == 9 ? NAN : 1e9f;
    Bytes half(size_t(half_bytes(RowType::kQ8_0, kDim))), again = half;
    write_half(numbers, kDim, RowType::kQ8_0, half.data());
    plain_kernels().to_float(half.data(), RowType::kQ8_0, kDim, back);
    for (int64_t d = 0; d < kDim; ++d) {
      if (i % 10 == 9 && d >= 32) {
        EXPECT_FALSE(std::isfinite(back[d]));
        continue;
      }
      float largest = 0;
      for (int64_t j = d / 32 * 32; j < d / 32 * 32 + 32; ++j) {
        largest = std::max(largest, std::fabs(numbers[j]));
      }
      EXPECT_LE(std::fabs(back[d] - numbers[d]), largest / 127 * .51f + largest * 0x1p-11f);
    }
    write_half(back, kDim, RowType::kQ8_0, again.data());
    if (i % 10 != 9) EXPECT_TRUE(half == again);
  }
}

TEST(RowFormat, ATypeWithoutCodeThrows) {
  char half[64] = {};
  const float numbers[4] = {};
  EXPECT_THROW(write_half(numbers, 4, RowType(9), half), InternalError);
  EXPECT_THROW(plain_kernels().to_float(half, row_type(DType(9)), 4, nullptr), InternalError);
}

}  // namespace
}  // namespace pariskv::cpu
