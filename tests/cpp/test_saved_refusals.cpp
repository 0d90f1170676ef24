// A file that is not exactly what was written, or not for this cache, is refused in a sentence; a
// file that cannot be written leaves the old one. Nothing else changes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>

#include "saved/checksum.h"
#include "saved_support.h"
#include "support.h"

namespace pariskv {
namespace {

using test::config_of;
using test::contents;
using test::Driver;
using test::Folder;
using test::has;
using test::later;
using test::lived;
using test::put;
using test::refusal;

class Refused : public testing::Test {
 protected:
  Refused() : cache_(config_of()) {
    sequence_ = lived(cache_, step_);
    cache_.save(sequence_, path_);
    bytes_ = contents(path_);
    filler_ = lived(other_, step_);
    before_ = other_.stats();
  }

  /** The sentence with which these bytes are refused; nothing has changed. */
  std::string load(const std::string& bytes) {
    put(path_, bytes);
    return load_path(path_);
  }
  std::string load_path(const std::string& path) {
    const std::string text = refusal<std::invalid_argument>([&] { other_.load(path); });
    expect_unchanged();
    return text;
  }
  void expect_unchanged() {
    const Stats now = other_.stats();
    EXPECT_EQ(other_.sequences(), std::vector<SequenceId>{filler_});
    EXPECT_EQ(now.tokens, before_.tokens);
    EXPECT_EQ(now.memory.live, before_.memory.live);
    EXPECT_EQ(now.encoded_keys, before_.encoded_keys);
  }
  std::string changed(size_t at, int64_t value) const {
    std::string bytes = bytes_;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return bytes;
  }
  /** With the right checksum of its header. */
  static std::string summed(std::string bytes) {
    int64_t header = 0;
    std::memcpy(&header, bytes.data() + 16, sizeof header);
    const uint64_t sum = checksum_of(bytes.data(), header - 8);
    std::memcpy(bytes.data() + header - 8, &sum, sizeof sum);
    return bytes;
  }

  const Folder folder_;
  const std::string path_ = folder_ / "saved";
  Cache cache_;
  Cache other_{config_of()};
  uint32_t step_ = 0;
  SequenceId sequence_, filler_;
  std::string bytes_;
  Stats before_;
};

TEST_F(Refused, AFlippedBitWhereverItIs) {
  std::mt19937_64 random(7);
  std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
  const auto write = [&](size_t at, int byte) {
    file.seekp(std::streamoff(at)).put(char(byte)).flush();
    ASSERT_TRUE(file.good());
  };
  const auto flip = [&](size_t bit) {
    write(bit / 8, bytes_[bit / 8] ^ (1 << (bit % 8)));
    const std::string text = load_path(path_);
    write(bit / 8, bytes_[bit / 8]);
    EXPECT_TRUE(has(text, "[load] path: expected ") && has(text, path_)) << bit << ": " << text;
  };
  const size_t bits = bytes_.size() * 8;
  for (size_t bit = 0; bit < 1000 * 8; bit += 5) flip(bit);  // the header
  for (int i = 0; i < 1000; ++i) flip(size_t(random() % bits));
  flip(bits - 1);
  EXPECT_TRUE(contents(path_) == bytes_);
  EXPECT_EQ(other_.length(other_.load(path_)), cache_.length(sequence_));
}

TEST_F(Refused, AFileThatIsShorterOrLonger) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 60; ++i) load(bytes_.substr(0, random() % bytes_.size()));
  EXPECT_TRUE(has(load(""), "got " + path_ + " with 0 bytes"));
  EXPECT_TRUE(has(load(bytes_.substr(0, bytes_.size() - 1)), "its end is missing"));
  EXPECT_TRUE(has(load(bytes_ + '\0'), "something was added"));
  EXPECT_TRUE(has(load(bytes_ + bytes_), "something was added"));
}

TEST_F(Refused, AnotherKindOfFile) {
  EXPECT_TRUE(has(load(std::string(5000, 'x')), "got another kind of file"));
  EXPECT_TRUE(has(load(changed(8, 6)), "expected version 3 of saved sequences, got version 6"));
  EXPECT_TRUE(has(load(summed(changed(8, 6))), "a newer pariskv_core wrote it"));
  EXPECT_TRUE(has(load(changed(8, 2)), "expected version 3 of saved sequences, got version 2"));
  EXPECT_FALSE(has(load(changed(8, 0)), "newer"));
}

TEST_F(Refused, ABlockInAnotherPlace) {
  const size_t half = bytes_.size() / 2;
  std::string bytes = bytes_;
  std::swap_ranges(bytes.begin() + half, bytes.begin() + half + 4096, bytes.begin() + half + 8192);
  EXPECT_TRUE(has(load(bytes), "which is damaged: the checksum of its "));
}

TEST_F(Refused, SizesThatCannotBeWhateverTheirChecksum) {
  int64_t settings = 0;
  std::memcpy(&settings, bytes_.data() + 32, sizeof settings);
  const size_t layer = size_t(56 + settings);
  for (const int64_t value : {int64_t{-1}, int64_t{1} << 40, INT64_MAX, INT64_MIN, int64_t{77}}) {
    for (const size_t at : {size_t{16}, size_t{32}, size_t{40}, size_t{48}}) {
      const std::string bytes = changed(at, value);
      load(at == 16 ? bytes : summed(bytes));
    }
    for (size_t number = 0; number < 5; ++number) {
      if (number == 2 && value == 77) continue;  // a buffer may begin anywhere
      load(summed(changed(layer + 8 * number, value)));
    }
  }
}

TEST_F(Refused, AnotherModelOrPolicy) {
  const auto expect = [&](const char* sentence, const std::function<void(Config&, ParisKV&)>& set) {
    Config config = config_of();
    set(config, std::get<ParisKV>(config.policy));
    Cache cache(config);
    const std::string text = refusal<std::invalid_argument>([&] { cache.load(path_); });
    EXPECT_TRUE(has(text, sentence)) << text;
    EXPECT_TRUE(cache.sequences().empty());
  };
  expect("layers 2 as this one, got 1 in", [](Config& c, ParisKV&) { c.layers = 2; });
  expect("query_heads 8 as", [](Config& c, ParisKV&) { c.query_heads = 8; });
  expect("kv_heads 4 as this one, got 2 in", [](Config& c, ParisKV&) { c.kv_heads = 4; });
  expect("head_dim 128 as", [](Config& c, ParisKV&) { c.head_dim = 128; });
  expect("value_dim 128 as", [](Config& c, ParisKV&) { c.value_dim = 128; });
  expect("dtype bfloat16 as this one, got float32 in",
         [](Config& c, ParisKV&) { c.dtype = DType::kBFloat16; });
  expect("segment_tokens 128 as", [](Config& c, ParisKV&) { c.segment_tokens = 128; });
  expect("sink 3 as this one, got 2", [](Config& c, ParisKV&) { c.sink = 3; });
  expect("policy.seed 1 as this one, got 42", [](Config&, ParisKV& p) { p.seed = 1; });
  expect("policy.block 0 as this one, got 64", [](Config&, ParisKV& p) { p.block = 0; });
  expect("policy.scorer votes as", [](Config&, ParisKV& p) { p.scorer = Scorer::kVotes; });
}

TEST_F(Refused, PathsThatCannotBeReadOrWritten) {
  const auto code = [](const std::function<void()>& call, const std::string& sentence) {
    try {
      call();
    } catch (const FileError& error) {
      EXPECT_TRUE(has(error.what(), sentence)) << error.what();
      return error.code();
    }
    return 0;
  };
  const auto load = [&](const std::string& path, const char* sentence) {
    return code([&] { other_.load(path); }, sentence);
  };
  const auto save = [&](const std::string& path, const char* sentence) {
    return code([&] { cache_.save(sequence_, path); }, sentence);
  };
  EXPECT_EQ(load(folder_ / "none", "[load] path: cannot look at "), ENOENT);
  EXPECT_EQ(load(folder_ / "", "[load] path: expected a file, got a folder"), EISDIR);
  EXPECT_EQ(load("/dev/zero", "got a device or a pipe"), EINVAL);
  EXPECT_EQ(save(folder_ / "none/x", "cannot write to the folder "), ENOENT);
  EXPECT_EQ(save(folder_ / "", "[save] path: expected a file, got a folder"), EISDIR);
  EXPECT_EQ(save("/dev/full", "got a device or a pipe"), EINVAL);
  EXPECT_EQ(save(folder_ / "saved/x", "cannot look at "), ENOTDIR);
  EXPECT_EQ(save(folder_ / std::string(300, 'x').c_str(), "cannot look at"), ENAMETOOLONG);
  for (const std::string& path : {std::string(), std::string("a\0b", 3)}) {
    EXPECT_TRUE(has(refusal<std::invalid_argument>([&] { cache_.save(sequence_, path); }),
                    "[save] path: expected the path of a file"));
    EXPECT_TRUE(has(load_path(path), "[load] path: expected the path of a file"));
  }
  EXPECT_TRUE(has(refusal<std::invalid_argument>([&] { cache_.save(99, path_); }), "[save]"));
  EXPECT_EQ(folder_.files(), 1);
  EXPECT_TRUE(contents(path_) == bytes_);
  expect_unchanged();
}

TEST_F(Refused, AFileThatGrowsTooLargeLeavesTheOldOne) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{rlim_t(bytes_.size() / 2), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Driver driver{cache_, sequence_, step_};
  driver.decode();
  const std::string text = refusal<FileError>([&] { cache_.save(sequence_, path_); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(has(text, "[save] path: cannot write " + path_ + ": File too large")) << text;
  EXPECT_EQ(folder_.files(), 1);
  EXPECT_TRUE(contents(path_) == bytes_);
  cache_.save(sequence_, path_);
  EXPECT_FALSE(contents(path_) == bytes_);
  EXPECT_EQ(other_.length(other_.load(path_)), cache_.length(sequence_));
}

TEST_F(Refused, MoreThanTheBudgetHolds) {
  Config config = config_of();
  config.memory_budget = 6 << 20;
  Cache small(config);
  Driver driver{small, small.add()};
  driver.prefill(10);
  test::Rows rows(8000, 2, 64, 1);
  const SequenceId sequence = cache_.add();
  cache_.prefill(0, {sequence}, {8000}, rows.view(), rows.view());
  cache_.save(sequence, path_);
  const int64_t live = small.stats().memory.live;
  EXPECT_TRUE(has(refusal<OutOfMemory>([&] { small.load(path_); }), "[memory] asked for"));
  EXPECT_EQ(small.stats().memory.live, live);
  EXPECT_EQ(small.sequences(), std::vector<SequenceId>{driver.sequence});
  cache_.save(sequence_, path_);
  later(small, small.load(path_), step_);
}

TEST_F(Refused, EveryAllocationInTurn) {
  Config config = config_of();
  config.query_heads = config.kv_heads = 8;  // blocks that share no slab
  config.head_dim = config.value_dim = 128;
  config.memory_budget = 96 << 20;  // beside which a slab for blocks of rows would be large
  Cache calm(config);
  const SequenceId saved = lived(calm, step_);
  calm.save(saved, path_);
  const auto expected = later(calm, saved, step_);
  int64_t failures = 0;
  for (int64_t nth = 0; nth <= failures; ++nth) {
    const auto resource = std::make_shared<test::FailingResource>();
    Resources resources;
    resources.host = resource;
    Cache cache(config, resources);
    resource->fail_at = resource->calls + nth;
    SequenceId loaded = -1;
    try {
      loaded = cache.load(path_);
    } catch (const OutOfMemory&) {
      ++failures;
      EXPECT_EQ(cache.stats().memory.live, 0);
      EXPECT_TRUE(cache.sequences().empty());
      loaded = cache.load(path_);
    }
    resource->fail_at = -1;  // what follows may ask for more, too
    ASSERT_EQ(later(cache, loaded, step_), expected) << nth;
  }
  EXPECT_GE(failures, 8) << "too little was put to the test";
}

TEST_F(Refused, ALinkLeadsToTheFileThatIsReplaced) {
  const std::string link = folder_ / "link";
  ASSERT_EQ(::symlink("saved", link.c_str()), 0);
  Driver driver{cache_, sequence_, step_};
  driver.decode();
  cache_.save(sequence_, link);
  struct stat found{};
  ASSERT_EQ(::lstat(link.c_str(), &found), 0);
  EXPECT_TRUE(S_ISLNK(found.st_mode));
  EXPECT_FALSE(contents(path_) == bytes_);
  EXPECT_EQ(other_.length(other_.load(link)), cache_.length(sequence_));
  EXPECT_EQ(folder_.files(), 2);
}

}  // namespace
}  // namespace pariskv
