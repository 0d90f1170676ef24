#include "exact/exact_attention.h"

#include <algorithm>

#include "pariskv/error.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/** States of more queries than this holds are made one group of tokens after the other. */
constexpr int64_t kStateBytes = int64_t{64} << 20;
/**
 * Blocks that a launch should have: two for each multiprocessor of a large GPU. Rows are summed by
 * shares, so these numbers are part of the result: the same for every GPU, and not in tuning.h.
 */
constexpr int64_t kBlocks = 264;
constexpr int64_t kMostShares = 32, kLeastRows = 256;  // of a share

/** Blocks that share the rows: the same on every device, and wherever rows lie. */
int64_t shares_of(const AttendExactCall& call) {
  const int64_t queries = exact_block_queries(call);
  const int64_t blocks =
      (call.tokens * call.shape.group + queries - 1) / queries * call.shape.kv_heads;
  const int64_t most = std::min(kMostShares, (call.total + kLeastRows - 1) / kLeastRows);
  return std::clamp(kBlocks / blocks, int64_t{1}, most);
}

/** The call for tokens [first, first + count) of its own. */
AttendExactCall part_of(const AttendExactCall& call, int64_t first, int64_t count) {
  AttendExactCall part = call;
  const int64_t size = size_of(call.shape.dtype);
  part.tokens = count;
  part.total = call.total - call.tokens + first + count;
  part.end = part.total;
  part.q.data += first * call.q.stride_i * size;
  if (call.out.data != nullptr) part.out.data += first * call.out.stride_i * size;
  if (call.lse != nullptr) part.lse += first * call.lse_stride;
  return part;
}

/** Segments that have rows of a zone, which are narrow. */
std::vector<int64_t> narrow_segments(const ModelShape& shape, const SequenceView& view) {
  std::vector<int64_t> segments;
  const int64_t tokens = shape.segment_tokens;
  for (int64_t s = view.zone_begin / tokens; s * tokens < view.zone_end; ++s) segments.push_back(s);
  return view.zone_begin < view.zone_end ? segments : std::vector<int64_t>();
}

}  // namespace

int64_t& window_bytes() {
  static int64_t bytes = int64_t{32} << 20;
  return bytes;
}

std::vector<ExactAttention::Run> ExactAttention::runs_of(const std::vector<int64_t>& hosted,
                                                         int64_t segments, int64_t window) {
  std::vector<Run> runs;
  auto next = hosted.begin();
  for (int64_t s = 0; s < segments; ++s) {
    const bool brought = next != hosted.end() && *next == s;
    if (brought) ++next;
    const bool goes_on = !runs.empty() && runs.back().brought == brought &&
                         (!brought || s - runs.back().begin < window);
    if (goes_on) {
      runs.back().end = s + 1;
    } else {
      runs.push_back({s, s + 1, brought});
    }
  }
  return runs;
}

bool ExactAttention::reserve(Block& block, int64_t bytes, bool must) {
  if (block.bytes() >= bytes) return true;
  try {
    block = Block();
    block = arena_.allocate(bytes);
    return true;
  } catch (const OutOfMemory&) {
    if (must) throw;
    return false;
  }
}

void ExactAttention::attend(const AttendExactCall& whole, const SequenceView& view,
                            const std::vector<int64_t>& in_host_memory, cudaStream_t stream) {
  const ModelShape& shape = whole.shape;
  const std::vector<int64_t> hosted =
      shape.narrows() ? narrow_segments(shape, view) : in_host_memory;
  const int64_t segment_bytes = shape.row_block_bytes();
  const int64_t window = std::min(std::max(window_bytes() / segment_bytes, int64_t{1}),
                                  std::max(int64_t(hosted.size()), int64_t{1}));
  const int64_t shares = shares_of(whole);
  const int64_t token_bytes =
      shares * shape.query_heads() * exact_state_floats(shape) * int64_t(sizeof(float));
  // Groups begin where blocks of queries do, so that these are the same in one launch and in
  // several.
  const int64_t block = exact_block_queries(whole);
  const int64_t group = std::max(kStateBytes / token_bytes / block, int64_t{1}) * block;
  const bool one_launch = hosted.empty() && shares == 1;
  // Without room for this, rows are read over the bus wherever a block of queries needs them, if
  // they are plain.
  const bool must = shape.narrows() && !hosted.empty();
  if (one_launch || !reserve(states_, std::min(group, whole.tokens) * token_bytes, must) ||
      (!hosted.empty() && !reserve(windows_, kPlaces * window * segment_bytes, must))) {
    return launch_attend_exact(whole, stream);
  }
  begun_.record(stream);
  begun_.make_wait(copies_);
  for (Place& place : places_) place.taken = false;
  try {
    for (int64_t first = 0; first < whole.tokens; first += group) {
      AttendExactCall part = part_of(whole, first, std::min(group, whole.tokens - first));
      part.states = states_.as<float>();
      part.shares = shares;
      const int64_t segments = (part.total + shape.segment_tokens - 1) / shape.segment_tokens;
      attend_to_runs(part, view, runs_of(hosted, segments, window), window * segment_bytes, stream);
      launch_finish_exact(part, stream);
    }
  } catch (...) {
    sync_ignoring_errors(copies_);
    throw;
  }
}

void ExactAttention::attend_to_runs(AttendExactCall call, const SequenceView& view,
                                    const std::vector<Run>& runs, int64_t place_bytes,
                                    cudaStream_t stream) {
  int64_t brought = 0;
  for (const Run& run : runs) {
    call.begin = run.begin * call.shape.segment_tokens;
    call.end = std::min(run.end * call.shape.segment_tokens, call.total);
    call.staged = nullptr;
    Place* place = nullptr;
    if (run.brought) {
      place = &places_[brought % kPlaces];
      char* const target = windows_.as<char>() + brought++ % kPlaces * place_bytes;
      if (place->taken) place->read.make_wait(copies_);
      bring(run, call.shape, view, target);
      place->filled.record(copies_);
      place->filled.make_wait(stream);
      call.staged = target;
      call.staged_segment = run.begin;
    }
    launch_attend_exact(call, stream);
    if (place != nullptr) {
      place->read.record(stream);
      place->taken = true;
    }
    call.resumes = true;
  }
}

void ExactAttention::bring(const Run& run, const ModelShape& shape, const SequenceView& view,
                           char* target) {
  const int64_t segment_bytes = shape.row_block_bytes(), tokens = shape.segment_tokens;
  for (int64_t s = run.begin; s < run.end; ++s, target += segment_bytes) {
    const int64_t begin = std::max(view.zone_begin - s * tokens, int64_t{0});
    const int64_t end = std::min(view.zone_end - s * tokens, tokens);
    if (!shape.narrows() || begin > 0 || end < tokens) {
      check(runtime().copy(target, view.rows[s], size_t(segment_bytes), copies_),
            "copy rows to the device");
    }
    if (!shape.narrows()) continue;
    launch_widen({shape, static_cast<const char*>(view.narrow_rows[s]), view.summaries[s],
                  view[Part::kState], begin, end - begin, keys_of_segment(shape, target, begin),
                  values_of_segment(shape, target, begin)},
                 copies_);
  }
}

}  // namespace pariskv::cuda
