#include "exact_search.h"

#include "check.h"

namespace pariskv {

void ExactSearch::decode(const DecodeArgs& args, Stream stream) {
  if (backend_.capturing(stream)) {
    fail("[decode] stream: expected one that is not being captured: this device has no search for ",
         "the policy of this cache, and a recorded step would not see its sequences grow");
  }
  const std::vector<int64_t> lengths(size_t(args.batch), 1);
  if (args.k.data != nullptr && backend_.capabilities().decode_appends) {
    std::vector<int64_t> begin;
    for (int64_t i = 0; i < args.batch; ++i) begin.push_back(args.sequences[i].total - 1);
    backend_.append(
        {args.shape, args.batch, args.sequences, begin.data(), lengths.data(), args.k, args.v},
        stream);
  }
  // Rows in host memory are read where they lie: bringing them pays for many queries.
  const std::vector<std::vector<int64_t>> hosted(size_t(args.batch));
  AttendExactArgs exact{};
  exact.shape = shape_;
  exact.batch = args.batch;
  exact.sequences = args.sequences;
  exact.lengths = lengths.data();
  exact.hosted = hosted.data();
  exact.q = args.q;
  exact.logits = args.logits;
  exact.out = args.out;
  exact.lse = args.lse;
  backend_.attend_exact(exact, stream);
}

}  // namespace pariskv
