#include "exact_search.h"

namespace pariskv {

void ExactSearch::decode(const DecodeArgs& args, Stream stream) {
  const std::vector<int64_t> lengths(size_t(args.batch), 1);
  const std::vector<std::vector<int64_t>> hosted(size_t(args.batch));  // no zone has left yet
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
