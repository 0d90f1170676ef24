/** A program that keeps rows, and a cache that copies the same rows to compare with. */
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "cpu/rows.h"
#include "pariskv/pariskv.h"

namespace pariskv::test {

/** What a program's rows are written as, and the dtype of its queries. */
struct Lending {
  DType dtype;
  BorrowedType key, value;
};

/** A small config; with blocks of keys, zones open with 1,024 tokens. */
inline Config lending_config(const Lending& lending, int64_t block,
                             TailRule tail = TailRule::kSample) {
  Config config;
  config.layers = 2, config.query_heads = 4, config.kv_heads = 2;
  config.head_dim = 64, config.value_dim = 96, config.dtype = lending.dtype;
  config.sink = 2, config.local = 8, config.update = 16, config.dense_below = 64;
  config.segment_tokens = 64, config.threads = 1;
  auto& policy = std::get<ParisKV>(config.policy);
  policy.top_k = 4, policy.block = block;
  policy.tail = tail, policy.tail_rows = 16;
  return config;
}

inline BorrowedRows lent_rows(const Lending& lending) {
  constexpr int64_t kGap = 12;
  return {lending.key, lending.value, half_bytes(row_type(lending.key), 64) + kGap, 0};
}

/**
 * Memory of a program: cells in no order, K and V apart. A cell that no sequence has any more is
 * filled with NaN, so that whoever reads it is found out.
 */
class Cells {
 public:
  Cells(const Config& config, const BorrowedRows& lent, int64_t count)
      : config_(config),
        lent_(lent),
        key_token_(config.kv_heads * lent.key_head_stride + 8),
        value_bytes_(half_bytes(row_type(lent.value), config.value_dim)),
        value_token_(config.kv_heads * value_bytes_),
        users_(static_cast<size_t>(count)) {
    for (int64_t l = 0; l < config.layers; ++l) {
      keys_.emplace_back(static_cast<size_t>(count * key_token_), '\xff');
      values_.emplace_back(static_cast<size_t>(count * value_token_), '\xff');
    }
    for (int64_t i = 0; i < count; ++i) free_.push_back(i);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(1));
  }

  int64_t take() {
    const int64_t cell = free_.back();
    free_.pop_back();
    users_[size_t(cell)] = 1;
    return cell;
  }
  void share(int64_t cell) { ++users_[size_t(cell)]; }
  bool shared(int64_t cell) const { return users_[size_t(cell)] > 1; }
  void give(int64_t cell) {
    if (--users_[size_t(cell)] > 0) return;
    for (int64_t l = 0; l < config_.layers; ++l) {
      std::fill_n(key(l, cell), key_token_, '\xff');
      std::fill_n(value(l, cell), value_token_, '\xff');
    }
    free_.insert(free_.begin(), cell);
  }
  int64_t left() const { return int64_t(free_.size()); }

  char* key(int64_t layer, int64_t cell) { return keys_[size_t(layer)].data() + cell * key_token_; }
  char* value(int64_t layer, int64_t cell) {
    return values_[size_t(layer)].data() + cell * value_token_;
  }

  /** Random numbers for a token, written as rows are. */
  void write(int64_t cell, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(static_cast<size_t>(config_.value_dim));
    for (int64_t l = 0; l < config_.layers; ++l) {
      for (int64_t h = 0; h < config_.kv_heads; ++h) {
        for (float& x : numbers) x = normal(random);
        cpu::write_half(numbers.data(), config_.head_dim, row_type(lent_.key),
                        key(l, cell) + h * lent_.key_head_stride);
        for (float& x : numbers) x = normal(random);
        cpu::write_half(numbers.data(), config_.value_dim, row_type(lent_.value),
                        value(l, cell) + h * value_bytes_);
      }
    }
  }

  void copy(int64_t from, int64_t to) {
    for (int64_t l = 0; l < config_.layers; ++l) {
      std::copy_n(key(l, from), key_token_, key(l, to));
      std::copy_n(value(l, from), value_token_, value(l, to));
    }
  }

  RowAddresses addresses(int64_t layer, const std::vector<int64_t>& cells) {
    RowAddresses rows;
    for (const int64_t cell : cells) {
      rows.keys.push_back(key(layer, cell));
      rows.values.push_back(value(layer, cell));
    }
    return rows;
  }

  /** The numbers of K or V of these cells, as a tensor of the config's dtype. */
  std::vector<char> numbers(int64_t layer, const std::vector<int64_t>& cells, bool values) {
    const int64_t dim = values ? config_.value_dim : config_.head_dim;
    const int64_t stride = values ? value_bytes_ : lent_.key_head_stride;
    std::vector<float> row(static_cast<size_t>(dim));
    std::vector<char> all(size_t(int64_t(cells.size()) * config_.kv_heads * dim) *
                          size_t(size_of(config_.dtype)));
    char* out = all.data();
    for (const int64_t cell : cells) {
      for (int64_t h = 0; h < config_.kv_heads; ++h) {
        const char* half = (values ? value(layer, cell) : key(layer, cell)) + h * stride;
        cpu::plain_kernels().to_float(half, row_type(values ? lent_.value : lent_.key), dim,
                                      row.data());
        cpu::write_half(row.data(), dim, row_type(config_.dtype), out);
        out += dim * size_of(config_.dtype);
      }
    }
    return all;
  }

 private:
  const Config config_;
  const BorrowedRows lent_;
  const int64_t key_token_, value_bytes_, value_token_;
  std::vector<std::vector<char>> keys_, values_;
  std::vector<int> users_;
  std::vector<int64_t> free_;
};

/** A packed tensor of a dtype. */
struct Packed {
  std::vector<char> data;
  TensorView view;

  Packed(DType dtype, int64_t tokens, int64_t heads, int64_t dim)
      : data(static_cast<size_t>(tokens * heads * dim * size_of(dtype))),
        view(TensorView::contiguous(data.data(), dtype, {tokens, heads, dim})) {}
  Packed(std::vector<char> bytes, DType dtype, int64_t tokens, int64_t heads, int64_t dim)
      : data(std::move(bytes)),
        view(TensorView::contiguous(data.data(), dtype, {tokens, heads, dim})) {}
  Packed(const Packed&) = delete;

  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(view.shape[2]));
    for (int64_t i = 0; i < view.shape[0] * view.shape[1]; ++i) {
      for (float& x : row) x = normal(random);
      cpu::write_half(row.data(), view.shape[2], row_type(view.dtype),
                      data.data() + i * view.shape[2] * size_of(view.dtype));
    }
  }
};

/** What was done to a sequence, so that a cache that copies can do it again with other rows. */
struct Deed {
  enum class Kind { kPrefill, kPrefillWithQueries, kDecode, kAttend, kTruncate };
  Kind kind;
  int64_t begin, tokens;  // for kTruncate: how many stay
  uint32_t seed;          // of queries
};

/** A sequence of both caches, and the cells of its tokens. */
struct Twin {
  SequenceId borrowing, copying;
  std::vector<int64_t> cells;
  std::vector<Deed> deeds;
};

/**
 * Two caches side by side: all that one answers has to be what the other does. With a tail that is
 * so up to 8 bits: rows of it are copied in these, and borrowed ones read as they are.
 */
class Twins {
 public:
  Twins(const Lending& lending, int64_t block, TailRule tail, int64_t cells)
      : config_(lending_config(lending, block, tail)),
        cells_(config_, lent_rows(lending), cells),
        borrowing_(borrowing_config(config_, lending)),
        copying_(config_),
        spare_(cells_.take()) {
    std::mt19937 random(2);
    cells_.write(spare_, random);
    add();
  }

  std::vector<Twin>& twins() { return twins_; }
  Cells& cells() { return cells_; }
  Cache& borrowing() { return borrowing_; }
  Cache& copying() { return copying_; }

  void add() { twins_.push_back({borrowing_.add(), copying_.add(), {}, {}}); }

  void remove(size_t i) {
    borrowing_.remove(twins_[i].borrowing), copying_.remove(twins_[i].copying);
    for (const int64_t cell : twins_[i].cells) cells_.give(cell);
    twins_.erase(twins_.begin() + int64_t(i));
  }

  void fork(size_t i) {
    Twin twin = twins_[i];
    twin.borrowing = borrowing_.fork(twin.borrowing), twin.copying = copying_.fork(twin.copying);
    for (const int64_t cell : twin.cells) cells_.share(cell);
    twins_.push_back(twin);
  }

  void prefill(size_t i, int64_t tokens, bool queries, uint32_t seed, std::mt19937& random) {
    Twin& twin = twins_[i];
    const auto kind = queries ? Deed::Kind::kPrefillWithQueries : Deed::Kind::kPrefill;
    twin.deeds.push_back({kind, int64_t(twin.cells.size()), tokens, seed});
    const std::vector<int64_t> fresh = grow(twin, tokens, random);
    PrefillOptions options;
    Packed q(config_.dtype, tokens, config_.query_heads, config_.head_dim);
    for (int64_t l = 0; l < config_.layers; ++l) {
      q.fill(seed + uint32_t(l));
      if (queries) options.q = q.view;
      borrowing_.prefill_rows(l, {twin.borrowing}, {tokens}, cells_.addresses(l, fresh), options);
    }
    again(twin, twin.deeds.back());
  }

  /** One token of each of these, in a batch. */
  void decode(const std::vector<size_t>& which, uint32_t seed, std::mt19937& random) {
    std::vector<SequenceId> borrowing, copying;
    std::vector<int64_t> fresh;
    for (const size_t i : which) {
      Twin& twin = twins_[i];
      borrowing.push_back(twin.borrowing), copying.push_back(twin.copying);
      twin.deeds.push_back({Deed::Kind::kDecode, int64_t(twin.cells.size()), 1, seed});
      fresh.push_back(grow(twin, 1, random)[0]);
    }
    const int64_t count = int64_t(which.size());
    Packed q(config_.dtype, count, config_.query_heads, config_.head_dim);
    Packed lent(config_.dtype, count, config_.query_heads, config_.value_dim);
    Packed owned(config_.dtype, count, config_.query_heads, config_.value_dim);
    for (int64_t l = 0; l < config_.layers; ++l) {
      q.fill(seed + uint32_t(l));
      std::vector<float> lse(size_t(count * config_.query_heads)), other = lse;
      borrowing_.decode_rows(l, borrowing, q.view, cells_.addresses(l, fresh), lent.view,
                             with_lse(lse, count));
      Packed k(cells_.numbers(l, fresh, false), config_.dtype, count, config_.kv_heads,
               config_.head_dim);
      Packed v(cells_.numbers(l, fresh, true), config_.dtype, count, config_.kv_heads,
               config_.value_dim);
      copying_.decode(l, copying, q.view, k.view, v.view, owned.view, with_lse(other, count));
      if (has_tail()) {
        ASSERT_LT(apart(floats_of(lent.data), floats_of(owned.data)), .05f) << "layer " << l;
        ASSERT_LT(apart(lse, other), .05f) << "layer " << l;
      } else {
        ASSERT_TRUE(lent.data == owned.data) << "decode, layer " << l;
        ASSERT_TRUE(lse == other) << "decode, layer " << l;
      }
    }
  }

  void attend(size_t i, int64_t tokens, uint32_t seed, std::mt19937& random) {
    Twin& twin = twins_[i];
    twin.deeds.push_back({Deed::Kind::kAttend, int64_t(twin.cells.size()), tokens, seed});
    const std::vector<int64_t> fresh = grow(twin, tokens, random);
    std::vector<std::vector<char>> outputs;
    Packed q(config_.dtype, tokens, config_.query_heads, config_.head_dim);
    Packed out(config_.dtype, tokens, config_.query_heads, config_.value_dim);
    for (int64_t l = 0; l < config_.layers; ++l) {
      q.fill(seed + uint32_t(l));
      borrowing_.attend_rows(l, {twin.borrowing}, {tokens}, q.view, cells_.addresses(l, fresh),
                             out.view);
      outputs.push_back(out.data);
    }
    ASSERT_TRUE(outputs == again(twin, twin.deeds.back())) << "attend";
  }

  void truncate(size_t i, int64_t keep) {
    Twin& twin = twins_[i];
    borrowing_.truncate({twin.borrowing}, Cut::keep({keep}));
    twin.deeds.push_back({Deed::Kind::kTruncate, 0, keep, 0});
    again(twin, twin.deeds.back());
    for (int64_t p = keep; p < int64_t(twin.cells.size()); ++p) cells_.give(twin.cells[size_t(p)]);
    twin.cells.resize(size_t(keep));
  }

  /** Rows of a range go to other cells. */
  void move(size_t i, int64_t begin, int64_t tokens) {
    Twin& twin = twins_[i];
    std::vector<int64_t> old, fresh;
    for (int64_t p = begin; p < begin + tokens; ++p) {
      old.push_back(twin.cells[size_t(p)]);
      fresh.push_back(cells_.take());
      cells_.copy(old.back(), fresh.back());
      twin.cells[size_t(p)] = fresh.back();
    }
    for (int64_t l = 0; l < config_.layers; ++l) {
      borrowing_.move_rows(l, {twin.borrowing}, {begin}, {tokens}, cells_.addresses(l, fresh));
    }
    for (const int64_t cell : old) cells_.give(cell);
  }

  /** All rows get other numbers where they are, as by a shift of positions. */
  void rewrite(std::mt19937& random) {
    std::map<int64_t, int> done;
    std::vector<SequenceId> all;
    for (Twin& twin : twins_) {
      all.push_back(twin.borrowing);
      for (const int64_t cell : twin.cells) {
        if (done[cell]++ == 0) cells_.write(cell, random);
      }
      copying_.remove(twin.copying);
      twin.copying = copying_.add();
      for (const Deed& deed : twin.deeds) again(twin, deed);
    }
    for (int64_t l = 0; l < config_.layers; ++l) borrowing_.rewrite_rows(l, all);
  }

  /** Compares all that can be looked at. */
  void look(size_t i, uint32_t seed) {
    const Twin& twin = twins_[i];
    const int64_t tokens = int64_t(twin.cells.size());
    Packed q(config_.dtype, 1, config_.query_heads, config_.head_dim);
    q.fill(seed);
    const TensorView one = TensorView::contiguous(q.data.data(), config_.dtype,
                                                  {config_.query_heads, config_.head_dim});
    for (int64_t l = 0; l < config_.layers; ++l) {
      ASSERT_EQ(borrowing_.length(twin.borrowing, l), tokens);
      const Explanation lent = borrowing_.explain(l, twin.borrowing, one);
      const Explanation owned = copying_.explain(l, twin.copying, one);
      ASSERT_EQ(lent.zone_tokens, owned.zone_tokens);
      ASSERT_TRUE(lent.positions == owned.positions);
      ASSERT_TRUE(lent.worth == owned.worth && lent.exact == owned.exact);
      const Summaries keys = borrowing_.summaries(l, twin.borrowing);
      const Summaries others = copying_.summaries(l, twin.copying);
      ASSERT_TRUE(keys.signs == others.signs && keys.weights == others.weights);
      ASSERT_TRUE(keys.means == others.means && keys.balance == others.balance);
      Packed k(config_.dtype, tokens, config_.kv_heads, config_.head_dim);
      Packed v(config_.dtype, tokens, config_.kv_heads, config_.value_dim);
      borrowing_.read(l, twin.borrowing, 0, k.view, v.view);
      ASSERT_TRUE(k.data == cells_.numbers(l, twin.cells, false));
      ASSERT_TRUE(v.data == cells_.numbers(l, twin.cells, true));
    }
  }

 private:
  static Config borrowing_config(Config config, const Lending& lending) {
    config.borrowed = lent_rows(lending);
    return config;
  }
  bool has_tail() const { return std::get<ParisKV>(config_.policy).tail == TailRule::kSample; }
  std::vector<float> floats_of(const std::vector<char>& numbers) const {
    const int64_t count = int64_t(numbers.size()) / size_of(config_.dtype);
    std::vector<float> floats(static_cast<size_t>(count));
    cpu::plain_kernels().to_float(numbers.data(), row_type(config_.dtype), count, floats.data());
    return floats;
  }
  /** The largest difference of two numbers. */
  static float apart(const std::vector<float>& some, const std::vector<float>& others) {
    float most = 0;
    for (size_t i = 0; i < some.size(); ++i) {
      const float difference = std::fabs(some[i] - others[i]);
      most = difference <= most ? most : difference;  // NaN is the most
    }
    return most;
  }

  AttendOptions with_lse(std::vector<float>& lse, int64_t count) const {
    AttendOptions options;
    options.lse = TensorView::contiguous(lse.data(), DType::kFloat32, {count, config_.query_heads});
    return options;
  }

  std::vector<int64_t> grow(Twin& twin, int64_t tokens, std::mt19937& random) {
    std::vector<int64_t> fresh;
    for (int64_t i = 0; i < tokens; ++i) {
      fresh.push_back(cells_.take());
      cells_.write(fresh.back(), random);
    }
    twin.cells.insert(twin.cells.end(), fresh.begin(), fresh.end());
    return fresh;
  }

  /** Lets the copying cache do a deed with the rows of today; what a cut took away are others. */
  std::vector<std::vector<char>> again(Twin& twin, const Deed& deed) {
    std::vector<std::vector<char>> outputs;
    if (deed.kind == Deed::Kind::kTruncate) {
      copying_.truncate({twin.copying}, Cut::keep({deed.tokens}));
      return outputs;
    }
    std::vector<int64_t> own;
    for (int64_t p = deed.begin; p < deed.begin + deed.tokens; ++p) {
      own.push_back(size_t(p) < twin.cells.size() ? twin.cells[size_t(p)] : spare_);
    }
    const int64_t tokens = deed.tokens;
    for (int64_t l = 0; l < config_.layers; ++l) {
      Packed k(cells_.numbers(l, own, false), config_.dtype, tokens, config_.kv_heads,
               config_.head_dim);
      Packed v(cells_.numbers(l, own, true), config_.dtype, tokens, config_.kv_heads,
               config_.value_dim);
      Packed q(config_.dtype, tokens, config_.query_heads, config_.head_dim);
      Packed out(config_.dtype, tokens, config_.query_heads, config_.value_dim);
      q.fill(deed.seed + uint32_t(l));
      PrefillOptions options;
      if (deed.kind == Deed::Kind::kPrefillWithQueries) options.q = q.view;
      if (deed.kind == Deed::Kind::kDecode) {
        copying_.decode(l, {twin.copying}, q.view, k.view, v.view, out.view);
      } else if (deed.kind == Deed::Kind::kAttend) {
        copying_.attend(l, {twin.copying}, {tokens}, q.view, k.view, v.view, out.view);
      } else {
        copying_.prefill(l, {twin.copying}, {tokens}, k.view, v.view, options);
      }
      outputs.push_back(out.data);
    }
    return outputs;
  }

  const Config config_;
  Cells cells_;
  Cache borrowing_, copying_;
  const int64_t spare_;  // a cell of no sequence, for tokens that a cut took away
  std::vector<Twin> twins_;
};

}  // namespace pariskv::test
