// Calls that bring tokens, and attend.
#include <algorithm>
#include <vector>

#include "c/handles.h"
#include "c/status.h"
#include "c/tensors.h"

using namespace pariskv;
using namespace pariskv::c;

pariskv_status pariskv_cache_prefill(pariskv_cache* cache, int64_t layer,
                                     const pariskv_batch* batch, const int64_t* lengths,
                                     const pariskv_tensor* k, const pariskv_tensor* v,
                                     const pariskv_prefill_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("prefill", cache);
    const Batch& sequences = batch_of("prefill", batch);
    PrefillOptions asked = options_of("prefill", sequences.size(), options);
    int32_t* const marks = unserved_of(options);
    std::vector<int64_t> unserved;
    if (marks != nullptr) asked.unserved = &unserved;
    found.prefill(layer, sequences, numbers_of("prefill", "lengths", sequences, lengths),
                  view_of("prefill", "k", k), view_of("prefill", "v", v), asked, Stream{stream});
    if (marks == nullptr || asked.page_rows.empty()) return;
    std::fill_n(marks, sequences.size(), 0);
    for (const int64_t place : unserved) marks[place] = 1;
  });
}

pariskv_status pariskv_cache_decode(pariskv_cache* cache, int64_t layer, const pariskv_batch* batch,
                                    const pariskv_tensor* q, const pariskv_tensor* k,
                                    const pariskv_tensor* v, const pariskv_tensor* out,
                                    const pariskv_attend_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("decode", cache);
    const Batch& sequences = batch_of("decode", batch);
    const TensorView queries = view_of("decode", "q", q), outputs = view_of("decode", "out", out);
    const AttendOptions asked = options_of("decode", sequences.size(), options);
    if (brings_rows("decode", k, v)) {
      found.decode(layer, sequences, queries, view_of("decode", "k", k), view_of("decode", "v", v),
                   outputs, asked, Stream{stream});
    } else {
      found.decode(layer, sequences, queries, outputs, asked, Stream{stream});
    }
  });
}

pariskv_status pariskv_cache_attend(pariskv_cache* cache, int64_t layer, const pariskv_batch* batch,
                                    const int64_t* lengths, const pariskv_tensor* q,
                                    const pariskv_tensor* k, const pariskv_tensor* v,
                                    const pariskv_tensor* out,
                                    const pariskv_attend_options* options, void* stream) {
  return answer([&] {
    Cache& found = cache_of("attend", cache);
    const Batch& sequences = batch_of("attend", batch);
    const std::vector<int64_t> tokens = numbers_of("attend", "lengths", sequences, lengths);
    const TensorView queries = view_of("attend", "q", q), outputs = view_of("attend", "out", out);
    const AttendOptions asked = options_of("attend", sequences.size(), options);
    if (brings_rows("attend", k, v)) {
      found.attend(layer, sequences, tokens, queries, view_of("attend", "k", k),
                   view_of("attend", "v", v), outputs, asked, Stream{stream});
    } else {
      found.attend(layer, sequences, tokens, queries, outputs, asked, Stream{stream});
    }
  });
}
