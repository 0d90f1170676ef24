// PRKV's steps, and what is to be known of one.
#include <algorithm>
#include <limits>

#include "cuda_backend.h"
#include "policy/prkv/pages.h"
#include "prkv/decode/call.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

PageDecodeCall page_call(const DecodeArgs& args, const PRKVRules& rules, const Lane* lanes) {
  PageDecodeCall call{};
  static_cast<StepCall&>(call) = step_of(args, lanes);
  call.rules = rules;
  return call;
}

/** Half as much again as asked, so that a growing zone comes here rarely: it is a cudaMalloc. */
int64_t roomy(int64_t pages) { return (pages + pages / 2 + 255) / 256 * 256; }

}  // namespace

void CudaBackend::reserve_lane(int64_t row, const DecodeArgs& args, const PRKVRules& rules,
                               const SequenceView& sequence) {
  HostLane& host = host_lane(row);
  Lane lane = host.sent;
  lane.layers = sequence.device - args.layer;
  const bool none = host.scratch.data() == nullptr, searches = rules.has_pages();
  const int64_t pages =
      searches && sequence.sparse != 0 ? sequence.zone_tokens() / rules.page + 2 : 0;
  if (none || pages > lane.zone_capacity) {
    lane.zone_capacity = searches ? roomy(std::max(pages, int64_t{1})) : 0;
    lane.head_bytes = searches ? PageScratchLayout::of(args.shape, rules).bytes(lane.zone_capacity)
                               : kept_decode_bytes(args.shape);
    host.scratch = arena_.allocate(args.shape.kv_heads * lane.head_bytes);
    lane.scratch.resident = host.scratch.as<float>();
  }
  send_lane(row, lane);
}

void CudaBackend::launch(const DecodeArgs& args, const PRKVRules& rules, Stream stream) {
  PageDecodeCall call = page_call(args, rules, lanes_.as<Lane>());
  call.counters = counters_.as<int64_t>();
  if (!rules.has_pages()) return launch_kept_decode(call, handle_of(stream));
  launch_page_decode(call, handle_of(stream));
}

Trace CudaBackend::trace(const DecodeArgs& args, const PRKVRules& rules, Stream stream) {
  const ModelShape& shape = args.shape;
  const SequenceView& sequence = args.sequences[0];
  PRKVTrace trace;
  trace.kept.resize(size_t(shape.kv_heads));
  PRKVSplit split = rules.split(0);
  if (sequence.kept != nullptr) {
    const KeptLayout layout = shape.kept(sequence.kept_capacity);
    std::vector<char> block(static_cast<size_t>(layout.ages_offset()));
    fetch(block.data(), sequence.kept, layout.ages_offset());
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int32_t* positions = layout.positions(block.data(), head);
      trace.kept[size_t(head)].assign(positions, positions + layout.counts(block.data(), head)[0]);
    }
    const AmendedLayout amended = amended_of(shape, sequence.kept_capacity);
    fetch(&split, amended.split(sequence.kept), int64_t(sizeof split));
  }
  trace.static_rows = split.rows;
  if (split.pages == 0) return trace;
  PageDecodeCall call = page_call(args, rules, lanes_.as<Lane>() + kMostBatch);
  call.explains = true;
  launch_page_decode(call, handle_of(stream));
  wait_for(handle_of(stream), "explain");
  for (int64_t head = 0; head < shape.kv_heads; ++head) add_pages(args, rules, head, trace);
  return trace;
}

/** What a step has found for a kv head. */
void CudaBackend::add_pages(const DecodeArgs& args, const PRKVRules& rules, int64_t head,
                            PRKVTrace& trace) {
  const SequenceView& sequence = args.sequences[0];
  const Lane& lane = explaining_.sent;
  const PageScratchLayout layout = PageScratchLayout::of(args.shape, rules);
  const char* base = reinterpret_cast<const char*>(lane.scratch.resident) + head * lane.head_bytes;
  const int64_t first = sequence.zone_begin / rules.page;
  const int64_t pages = (sequence.zone_end - 1) / rules.page + 1 - first;
  PageSearch search{};
  fetch(&search, base + layout.search, int64_t(sizeof search));
  std::vector<float> scores(static_cast<size_t>(pages));
  fetch(scores.data(), base + layout.scores, pages * int64_t(sizeof(float)));
  std::vector<FoundPage> found(static_cast<size_t>(search.found));
  if (!found.empty()) {
    fetch(found.data(), base + layout.found(lane.zone_capacity),
          search.found * int64_t(sizeof(FoundPage)));
  }
  std::stable_sort(found.begin(), found.end(), [&](const FoundPage& a, const FoundPage& b) {
    return scores[size_t(a.page)] > scores[size_t(b.page)];
  });
  for (float& score : scores) score /= float(std::max(search.asking, 1));
  std::vector<int64_t>& numbers = trace.pages.emplace_back();
  std::vector<int32_t>& positions = trace.positions.emplace_back();
  for (const FoundPage& page : found) {
    numbers.push_back(first + page.page);
    for (int64_t r = 0; r < rules.page; ++r) {
      if ((page.live >> r & 1) == 0) continue;
      positions.push_back(int32_t((first + page.page) * rules.page + r));
    }
  }
  trace.scores.push_back(std::move(scores));
}

}  // namespace pariskv::cuda
