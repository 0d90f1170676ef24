/**
 * Rows that the program keeps in its own memory, and a cache on the CPU reads in place: the cache
 * has their addresses and the summaries of their keys, and no copy. With the policy ParisKV.
 *
 *   config.borrowed = pariskv::BorrowedRows{BorrowedType::kFloat16, BorrowedType::kQ8_0};
 *   config.dtype = pariskv::DType::kFloat32;                // of queries and outputs
 *   ...
 *   cache.prefill_rows(layer, {chat}, {tokens}, {keys, values});
 *   cache.decode_rows(layer, {chat}, q, {{key}, {value}}, out);
 *
 * Rows are read during calls alone. As long as a sequence or a fork of it has a token, that token's
 * rows have to be there and stay as they were. A program that moves rows says so with `move_rows`
 * before any other call on their sequence: calls that append read older rows, too, as these enter
 * the zone. One that writes other numbers there says so with `rewrite_rows`, before the next call
 * that attends. Removing a sequence, or truncating it, ends all that for the tokens that go.
 */
#pragma once

#include <cstdint>
#include <vector>

namespace pariskv {

/** How the numbers of borrowed rows are written. */
enum class BorrowedType : uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kQ8_0,  ///< ggml's: blocks of 32 numbers of 8 bits, each behind a float16 that they are times.
};

/** How borrowed rows lie: the dimensions of a head side by side, heads at a stride. */
struct BorrowedRows {
  BorrowedType key = BorrowedType::kFloat16;
  BorrowedType value = BorrowedType::kFloat16;
  int64_t key_head_stride = 0;    ///< Bytes from K of a kv head to that of the next; 0: no gap.
  int64_t value_head_stride = 0;  ///< The same of V.

  friend bool operator==(const BorrowedRows& a, const BorrowedRows& b) {
    return a.key == b.key && a.value == b.value && a.key_head_stride == b.key_head_stride &&
           a.value_head_stride == b.value_head_stride;
  }
};

/** Where the rows of a call's tokens lie, packed as tokens are: K and V of the first kv head. */
struct RowAddresses {
  std::vector<const void*> keys;    ///< (sum of lengths), at multiples of the numbers' size
  std::vector<const void*> values;  ///< (sum of lengths); of q8_0 at multiples of 2 bytes
};

}  // namespace pariskv
