// Calls on rows that the program keeps.
#include "c/handles.h"
#include "c/status.h"
#include "c/tensors.h"

using namespace pariskv;
using namespace pariskv::c;

namespace {

/** Addresses for so many tokens as the lengths add up to; a sum that is none is Cache's to refuse.
 */
RowAddresses addresses_of(const char* verb, const std::vector<int64_t>& lengths,
                          const void* const* keys, const void* const* values) {
  int64_t tokens = 0;
  for (const int64_t length : lengths) {
    if (length < 0 || length > kMostTokens) {
      fail("[", verb, "] lengths: expected 0 to ", kMostTokens, " tokens, got ", length);
    }
    tokens += length;
  }
  if (tokens > 0 && (keys == nullptr || values == nullptr)) {
    fail("[", verb, "] ", keys == nullptr ? "keys" : "values", ": expected ", tokens,
         " addresses, got a null pointer");
  }
  if (tokens == 0) return {};
  RowAddresses rows;  // braces would make lists of two addresses
  rows.keys.assign(keys, keys + tokens);
  rows.values.assign(values, values + tokens);
  return rows;
}

}  // namespace

pariskv_status pariskv_cache_prefill_rows(pariskv_cache* cache, int64_t layer,
                                          const pariskv_batch* batch, const int64_t* lengths,
                                          const void* const* keys, const void* const* values,
                                          const pariskv_prefill_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("prefill_rows", cache);
    const Batch& sequences = batch_of("prefill_rows", batch);
    const std::vector<int64_t> tokens = numbers_of("prefill_rows", "lengths", sequences, lengths);
    found.prefill_rows(layer, sequences, tokens, addresses_of("prefill_rows", tokens, keys, values),
                       options_of("prefill_rows", sequences.size(), options), Stream{stream});
  });
}

pariskv_status pariskv_cache_decode_rows(pariskv_cache* cache, int64_t layer,
                                         const pariskv_batch* batch, const pariskv_tensor* q,
                                         const void* const* keys, const void* const* values,
                                         const pariskv_tensor* out,
                                         const pariskv_attend_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("decode_rows", cache);
    const Batch& sequences = batch_of("decode_rows", batch);
    const std::vector<int64_t> ones(size_t(sequences.size()), 1);
    found.decode_rows(layer, sequences, view_of("decode_rows", "q", q),
                      addresses_of("decode_rows", ones, keys, values),
                      view_of("decode_rows", "out", out),
                      options_of("decode_rows", sequences.size(), options), Stream{stream});
  });
}

pariskv_status pariskv_cache_attend_rows(pariskv_cache* cache, int64_t layer,
                                         const pariskv_batch* batch, const int64_t* lengths,
                                         const pariskv_tensor* q, const void* const* keys,
                                         const void* const* values, const pariskv_tensor* out,
                                         const pariskv_attend_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("attend_rows", cache);
    const Batch& sequences = batch_of("attend_rows", batch);
    const std::vector<int64_t> tokens = numbers_of("attend_rows", "lengths", sequences, lengths);
    found.attend_rows(layer, sequences, tokens, view_of("attend_rows", "q", q),
                      addresses_of("attend_rows", tokens, keys, values),
                      view_of("attend_rows", "out", out),
                      options_of("attend_rows", sequences.size(), options), Stream{stream});
  });
}

pariskv_status pariskv_cache_move_rows(pariskv_cache* cache, int64_t layer,
                                       const pariskv_batch* batch, const int64_t* begin,
                                       const int64_t* lengths, const void* const* keys,
                                       const void* const* values, void* stream) {
  return answer([&] {
    Cache& found = cache_of("move_rows", cache);
    const Batch& sequences = batch_of("move_rows", batch);
    const std::vector<int64_t> first = numbers_of("move_rows", "begin", sequences, begin);
    const std::vector<int64_t> tokens = numbers_of("move_rows", "lengths", sequences, lengths);
    found.move_rows(layer, sequences, first, tokens,
                    addresses_of("move_rows", tokens, keys, values), Stream{stream});
  });
}

pariskv_status pariskv_cache_rewrite_rows(pariskv_cache* cache, int64_t layer,
                                          const pariskv_batch* batch, void* stream) {
  return answer([&] {
    cache_of("rewrite_rows", cache)
        .rewrite_rows(layer, batch_of("rewrite_rows", batch), Stream{stream});
  });
}
