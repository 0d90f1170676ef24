#include "prkv/search.h"

#include <algorithm>
#include <limits>

#include "choices.h"
#include "observe.h"
#include "policy/prkv/pages.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

PRKVSplit* split_in(const ModelShape& shape, const SequenceView& view) {
  return amended_of(shape, view.kept_capacity).split(view[Part::kKept]);
}

/** How many of the best pages a choice looks at; 0: at all rows, as after a prompt. */
int64_t wanted_pages(const PRKVRules& rules, const KeptChange& change) {
  const SequenceView& zone = change.after;
  if (change.fresh()) return 0;
  return rules.looked_at(ZonePages::of(zone.zone_begin, zone.zone_end, rules.page).count);
}

/** Rows that it looks at, at most. */
int64_t looked_at(const PRKVRules& rules, const KeptChange& change) {
  const int64_t zone = change.after.zone_tokens(), wanted = wanted_pages(rules, change);
  if (wanted == 0) return zone;
  const int64_t besides = PRKVRules::kLatestLookedAt + change.before.kept_capacity;
  return std::min(zone, wanted * rules.page + besides);
}

/** Streams that choices of many layers take turns on: one computes while another's rows come. */
constexpr int64_t kChoiceStreams = 2;

/**
 * Launches of choices: their spaces are still to be set. The budget is split by agreement only
 * where rows are chosen from scratch, as after a prompt, and not for a zone that was cut.
 */
std::vector<PRKVChoiceCall> choices_of(const ModelShape& shape, const PRKVRules& rules,
                                       const std::vector<KeptChange>& changes) {
  std::vector<PRKVChoiceCall> calls;
  const int64_t most = changes.size() > 1 ? kChoiceBytes / kChoiceStreams : kChoiceBytes;
  const auto compares = [&](const KeptChange& change) {
    return rules.automatic() && change.fresh() && !change.cut();
  };
  const auto scratch = [&](const KeptChange& change, SideBySide& side) {
    const int64_t width = looked_at(rules, change);
    // Choices from all rows and from the best pages have other scratch, so never one launch.
    side.call.scratch = prkv_choice_scratch(shape, width, change.after.kept_capacity,
                                            wanted_pages(rules, change) > 0);
    const bool listed = side.call.scratch.listed != 0;
    side.head_bytes =
        side.call.scratch.bytes + look_scratch(shape, width, compares(change), listed).bytes;
  };
  const auto launch = [&](const SideBySide& side) {
    PRKVChoiceCall call{};
    call.choice = side.call;
    call.rules = rules;
    call.compares = compares(*side.changes[0]);  // others are cut alike, so they are asked alike
    for (int64_t i = 0; i < side.call.count; ++i) {
      const KeptChange& change = *side.changes[i];
      ChoiceJob& job = call.choice.jobs[i];
      job.added = change.after.zone_begin;
      call.wanted[i] = wanted_pages(rules, change);
      if (call.wanted[i] > 0) {
        const SequenceView& zone = change.after;
        const int64_t last = (zone.zone_end - 1) / rules.page;
        call.pages = std::max(call.pages, last + 1 - zone.zone_begin / rules.page);
      }
      job.rows = &split_in(shape, change.after)->rows;
      const bool known = rules.automatic() && !call.compares;
      call.before[i] = known ? split_in(shape, change.before) : nullptr;
    }
    call.choice.rules = {0, 0, uint32_t{1} << kTopPBits, 1, 0};
    call.look =
        look_scratch(shape, side.call.scratch.width, call.compares, side.call.scratch.listed != 0);
    const int64_t heads = side.call.heads, left = most - heads * side.call.scratch.bytes;
    call.heads_at_once =
        side.call.count > 1 ? heads : std::clamp(left / call.look.bytes, int64_t{1}, heads);
    calls.push_back(call);
  };
  side_by_side(shape, changes.data(), int64_t(changes.size()), most, scratch, launch);
  return calls;
}

/** Of the first space: what heads remember. */
int64_t choice_space(const PRKVChoiceCall& call) {
  return call.choice.count * call.choice.heads * call.choice.scratch.bytes;
}

/** Of the scratch of one stream. */
int64_t stream_bytes(const std::vector<PRKVChoiceCall>& calls) {
  int64_t bytes = 0;
  for (const PRKVChoiceCall& call : calls) {
    const int64_t look = call.choice.count * call.heads_at_once * call.look.bytes;
    bytes = std::max(bytes, choice_space(call) + look);
  }
  return bytes;
}

/** Scratch of slots, by the pages that a step looks at. */
struct PageRooms {
  Arena& arena;
  const ModelShape& shape;
  const PRKVRules& rules;

  Demand demand(const SequenceView& sequence) const {
    if (!rules.has_pages()) return {};
    return {sequence.dense() ? 1 : sequence.zone_tokens() / rules.page + 2, 0};
  }
  static Demand capacity(const KeptSlot& slot) { return {slot.page_capacity, 0}; }
  static int64_t with_room(int64_t pages) { return cuda::with_room(pages, 256); }

  Block make(KeptSlot& slot, const Demand& demand) const {
    slot.page_capacity = with_room(demand[0]);
    slot.head_bytes = rules.has_pages()
                          ? PageScratchLayout::of(shape, rules).bytes(slot.page_capacity)
                          : kept_decode_bytes(shape);
    Block scratch = arena.allocate(shape.kv_heads * slot.head_bytes);
    slot.scratch = scratch.as<char>();
    return scratch;
  }
};

}  // namespace

PRKVSearch::PRKVSearch(CudaBackend& backend, const PRKV& settings, const Config& config,
                       const ModelShape& shape)
    : KeptSearch(backend, settings, config,
                 with_row_cache(shape, config, settings.budget / settings.page * settings.page),
                 backend),
      counters_(backend) {}

void PRKVSearch::reserve_choice(const std::vector<KeptChange>& changes) {
  const std::vector<PRKVChoiceCall> calls = choices_of(shape_, rules_, changes);
  choices_.reserve(stream_bytes(calls) * std::min(int64_t(calls.size()), kChoiceStreams));
}

void PRKVSearch::choose(const std::vector<KeptChange>& changes, Stream stream) {
  const DeviceGuard guard(backend_.device());
  std::vector<PRKVChoiceCall> calls = choices_of(shape_, rules_, changes);
  const int64_t bytes = stream_bytes(calls);
  const auto launch = [&](int64_t i, int64_t branch, cudaStream_t own) {
    PRKVChoiceCall& call = calls[size_t(i)];
    call.bus = backend_.rows_leave() ? bus_.handle() : nullptr;
    call.choice.space = choices_.data() + branch * bytes;
    call.look_space = call.choice.space + choice_space(call);
    launch_prkv_choice(call, own);
  };
  backend_.branches().take_turns(int64_t(calls.size()), kChoiceStreams, handle_of(stream), launch);
}

void PRKVSearch::digest(const DigestArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  DigestCall call{args.shape, args.rules, 0, {}};
  for (int64_t i = 0; i < args.batch; ++i) {
    const DigestJob& job = args.jobs[i];
    call.spans[call.count++] = {job.sequence.device, job.begin, job.end};
    if (call.count < kMostSpans && i + 1 < args.batch) continue;
    launch_digest(call, handle_of(stream));
    call.count = 0;
  }
}

void PRKVSearch::reserve(const DecodeArgs& args) {
  const DeviceGuard guard(backend_.device());
  slots_.reserve(args, PageRooms{backend_.arena(), shape_, rules_});
}

PageDecodeCall PRKVSearch::call_of(const DecodeArgs& args) const {
  PageDecodeCall call{};
  static_cast<StepCall&>(call) = step_of(args);
  call.slots = slots_.data();
  call.rules = rules_;
  call.counters = counters_.data();
  return call;
}

void PRKVSearch::decode(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  slots_.check_batch(args.batch);
  if (args.batch == 0) return;
  const PageDecodeCall call = call_of(args);
  if (!rules_.has_pages()) return launch_kept_decode(call, handle_of(stream));
  launch_page_decode(call, handle_of(stream));
}

PRKVTrace PRKVSearch::trace(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  const ModelShape& shape = shape_;
  const SequenceView& sequence = args.sequences[0];
  PRKVTrace trace;
  trace.kept.resize(size_t(shape.kv_heads));
  PRKVSplit split = rules_.split(0);
  if (sequence[Part::kKept] != nullptr) {
    const KeptLayout layout = shape.kept(sequence.kept_capacity);
    std::vector<char> block(static_cast<size_t>(layout.ages_offset()));
    backend_.fetch(block.data(), sequence[Part::kKept], layout.ages_offset());
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int32_t* positions = layout.positions(block.data(), head);
      trace.kept[size_t(head)].assign(positions, positions + layout.counts(block.data(), head)[0]);
    }
    const AmendedLayout amended = amended_of(shape, sequence.kept_capacity);
    backend_.fetch(&split, amended.split(sequence[Part::kKept]), int64_t(sizeof split));
  }
  trace.static_rows = split.rows;
  if (split.pages == 0) return trace;
  PageDecodeCall call = call_of(args);
  call.slots = slots_.explained();
  call.counters = nullptr;
  call.explains = true;
  launch_page_decode(call, handle_of(stream));
  wait_for(handle_of(stream), "explain");
  for (int64_t head = 0; head < shape.kv_heads; ++head) add_pages(sequence, head, trace);
  return trace;
}

/** What a step has found for a kv head. */
void PRKVSearch::add_pages(const SequenceView& sequence, int64_t head, PRKVTrace& trace) {
  const KeptSlot& slot = slots_.sent_to_explain();
  const PageScratchLayout layout = PageScratchLayout::of(shape_, rules_);
  const char* base = slot.scratch + head * slot.head_bytes;
  const int64_t first = sequence.zone_begin / rules_.page;
  const int64_t pages = (sequence.zone_end - 1) / rules_.page + 1 - first;
  PageSearch search{};
  backend_.fetch(&search, base + layout.search, int64_t(sizeof search));
  std::vector<float> scores(static_cast<size_t>(pages));
  backend_.fetch(scores.data(), base + layout.scores, pages * int64_t(sizeof(float)));
  std::vector<FoundPage> found(static_cast<size_t>(search.found));
  if (!found.empty()) {
    backend_.fetch(found.data(), base + layout.found(slot.page_capacity),
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
    for (int64_t r = 0; r < rules_.page; ++r) {
      if ((page.live >> r & 1) == 0) continue;
      positions.push_back(int32_t((first + page.page) * rules_.page + r));
    }
  }
  trace.scores.push_back(std::move(scores));
}

}  // namespace pariskv::cuda
