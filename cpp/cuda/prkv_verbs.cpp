// PRKV's part of the backend: digests of pages, choices of kept rows.
#include <algorithm>
#include <vector>

#include "choices.h"
#include "cuda_backend.h"
#include "observe.h"
#include "policy/prkv/pages.h"

namespace pariskv::cuda {

namespace {

PRKVSplit* split_in(const ModelShape& shape, const SequenceView& view) {
  return amended_of(shape, view.kept_capacity).split(view.kept);
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
constexpr int64_t kLanes = 2;

/**
 * Launches of choices: their spaces are still to be set. The budget is split by agreement only
 * where rows are chosen from scratch, as after a prompt.
 */
std::vector<PRKVChoiceCall> choices_of(const PRKVKeep& args) {
  std::vector<PRKVChoiceCall> calls;
  const int64_t most = args.batch > 1 ? kChoiceBytes / kLanes : kChoiceBytes;
  const auto compares = [&](const KeptChange& change) {
    return args.rules.automatic() && change.fresh();
  };
  const auto scratch = [&](const KeptChange& change, SideBySide& side) {
    const int64_t width = looked_at(args.rules, change);
    // Choices from all rows and from the best pages have other scratch, so never one launch.
    side.call.scratch = prkv_choice_scratch(args.shape, width, change.after.kept_capacity,
                                            wanted_pages(args.rules, change) > 0);
    const bool listed = side.call.scratch.listed != 0;
    side.head_bytes =
        side.call.scratch.bytes + look_scratch(args.shape, width, compares(change), listed).bytes;
  };
  const auto launch = [&](const SideBySide& side) {
    PRKVChoiceCall call{};
    call.choice = side.call;
    call.rules = args.rules;
    call.compares = compares(*side.changes[0]);  // others are cut alike, so they are asked alike
    for (int64_t i = 0; i < side.call.count; ++i) {
      const KeptChange& change = *side.changes[i];
      ChoiceJob& job = call.choice.jobs[i];
      job.added = change.after.zone_begin;
      call.wanted[i] = wanted_pages(args.rules, change);
      if (call.wanted[i] > 0) {
        const SequenceView& zone = change.after;
        const int64_t last = (zone.zone_end - 1) / args.rules.page;
        call.pages = std::max(call.pages, last + 1 - zone.zone_begin / args.rules.page);
      }
      job.rows = &split_in(args.shape, change.after)->rows;
      const bool known = args.rules.automatic() && !call.compares;
      call.before[i] = known ? split_in(args.shape, change.before) : nullptr;
    }
    call.choice.rules = {0, 0, uint32_t{1} << kTopPBits, 1, 0};
    call.look = look_scratch(args.shape, side.call.scratch.width, call.compares,
                             side.call.scratch.listed != 0);
    const int64_t heads = side.call.heads, left = most - heads * side.call.scratch.bytes;
    call.heads_at_once =
        side.call.count > 1 ? heads : std::clamp(left / call.look.bytes, int64_t{1}, heads);
    calls.push_back(call);
  };
  side_by_side(args.shape, args.changes, args.batch, most, scratch, launch);
  return calls;
}

/** Of the first space: what heads remember. */
int64_t choice_space(const PRKVChoiceCall& call) {
  return call.choice.count * call.choice.heads * call.choice.scratch.bytes;
}

/** Of the scratch of a lane. */
int64_t lane_bytes(const std::vector<PRKVChoiceCall>& calls) {
  int64_t bytes = 0;
  for (const PRKVChoiceCall& call : calls) {
    const int64_t look = call.choice.count * call.heads_at_once * call.look.bytes;
    bytes = std::max(bytes, choice_space(call) + look);
  }
  return bytes;
}

}  // namespace

int64_t CudaBackend::choice_bytes(const PRKVKeep& args) {
  const std::vector<PRKVChoiceCall> calls = choices_of(args);
  return lane_bytes(calls) * std::min(int64_t(calls.size()), kLanes);
}

void CudaBackend::keep_up(const PRKVDigest& args, Stream stream) {
  const DeviceGuard guard(device_);
  DigestCall call{args.shape, args.rules, 0, {}};
  for (int64_t i = 0; i < args.batch; ++i) {
    const DigestJob& job = args.jobs[i];
    call.spans[call.count++] = {job.sequence.device, job.begin, job.end};
    if (call.count < kMostSpans && i + 1 < args.batch) continue;
    launch_digest(call, handle_of(stream));
    call.count = 0;
  }
}

void CudaBackend::keep_up(const PRKVKeep& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeptChange& change = args.changes[i];
    if (!change.cut()) continue;
    launch_prkv_trim({trim_of(args.shape, change), args.rules}, handle_of(stream));
  }
  std::vector<PRKVChoiceCall> calls = choices_of(args);
  const int64_t bytes = lane_bytes(calls);
  const auto launch = [&](int64_t i, int64_t lane, cudaStream_t own) {
    PRKVChoiceCall& call = calls[size_t(i)];
    call.bus = offloads_ ? bus_.handle() : nullptr;
    call.choice.space = choices_.as<char>() + lane * bytes;
    call.look_space = call.choice.space + choice_space(call);
    launch_prkv_choice(call, own);
  };
  branches_.take_turns(int64_t(calls.size()), kLanes, handle_of(stream), launch);
}

}  // namespace pariskv::cuda
