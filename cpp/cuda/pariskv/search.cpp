#include "pariskv/search.h"

#include <algorithm>
#include <type_traits>

#include "conditional.h"
#include "policy/pariskv/plan.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

CodecConstants constants_of(const Codec& codec) {
  CodecConstants constants{};
  constants.layout = codec.layout;
  for (size_t d = 0; d < codec.rotation_signs.size(); ++d) {
    if (codec.rotation_signs[d] < 0) constants.negative[d / 32] |= 1u << (d % 32);
  }
  std::copy(codec.thresholds.begin(), codec.thresholds.end(), constants.thresholds);
  std::copy(codec.centres.begin(), codec.centres.end(), constants.centres);
  return constants;
}

Crossings crossings_of(const Config& config) {
  if (config.dense_below != kDenseByBatch) return {};
  const Crossings& measured = tuning_of(config.device.index).crossings;
  return measured.of_heads(config.query_heads / config.kv_heads, config.head_dim);
}

/**
 * Bodies for all sequences of a batch, a fourth of them, and so on: launched for many, the search
 * of one would have a block a head.
 */
DenseChoice choice_for(int64_t batch, bool named) {
  DenseChoice choice{};
  for (int64_t room = batch; choice.count < DenseChoice::kMost; room = (room + 3) / 4) {
    choice.room[choice.count++] = int(room);
    if (room == 1 || !named) break;
  }
  return choice;
}

template <typename Launch>
void each_job(const EncodeArgs& args, int64_t begin, int64_t end, Launch launch) {
  for (int64_t i = begin; i < end; ++i) {
    const EncodeJob& job = args.jobs[i];
    if (job.begin >= job.end) continue;
    launch(EncodeCall{args.shape, constants_of(*args.codec), job.sequence.device, job.statistics,
                      job.balance, job.begin, job.end, job.opening, job.query_windows},
           job.sequence[Part::kState]);
  }
}

/** Scratch of slots, by the numbers of scored and of reranked keys. */
struct SearchRooms {
  Arena& arena;
  const ModelShape& shape;
  const ParisKVRules& rules;

  static Demand demand(const SequenceView& sequence) {
    return {sequence.dense() ? 0 : sequence.zone_tokens(), ParisKVPlan::candidates_of(sequence)};
  }
  static Demand capacity(const ParisKVSlot& slot) {
    return {slot.zone_capacity, slot.candidate_capacity};
  }
  static int64_t with_room(int64_t keys) { return cuda::with_room(keys, 4096); }

  Block make(ParisKVSlot& slot, const Demand& demand) const {
    const auto [zone, candidates] = demand;
    if (zone > slot.zone_capacity) slot.zone_capacity = with_room(zone);
    if (candidates > slot.candidate_capacity) slot.candidate_capacity = with_room(candidates);
    const auto lay_out = [&](char* base) {
      return lay_out_scratch(base, shape, rules, slot.zone_capacity, slot.candidate_capacity);
    };
    // It comes as zeros: no flag has the token of a step.
    slot.head_bytes = lay_out(nullptr).head_bytes;
    Block scratch = arena.allocate(shape.kv_heads * slot.head_bytes);
    slot.scratch = lay_out(scratch.as<char>()).first;
    return scratch;
  }
};

}  // namespace

ParisKVSearch::ParisKVSearch(CudaBackend& backend, const ParisKV& settings, const Config& config,
                             const ModelShape& shape)
    : ParisKVPolicy(settings, config, with_row_cache(shape, config, settings.top_k), backend,
                    crossings_of(config)),
      backend_(backend),
      tuning_(tuning_of(backend.device())),
      constants_(constants_of(*rules_.codec)),
      slots_(backend),
      counters_(backend, 2 * kMostNamed * int64_t(sizeof(int32_t))) {}

void ParisKVSearch::reserve(const DecodeArgs& args) {
  const DeviceGuard guard(backend_.device());
  slots_.reserve(args, SearchRooms{backend_.arena(), shape_, rules_});
}

void ParisKVSearch::copy_tail_rows(const TailCopyArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  for (int64_t i = 0; i < args.batch; ++i) {
    const TailCopyJob& job = args.jobs[i];
    launch_copy_tail({shape_, job.sequence.device, job.sequence[Part::kState], job.tail, job.from,
                      needs_.tail_rows},
                     handle_of(stream));
  }
}

void ParisKVSearch::encode(const EncodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  // A flush is a few hundred keys of each layer: one after the other they would leave most of the
  // device idle.
  backend_.branches().share(args.batch, tuning_.branch_jobs, tuning_.encode_branches,
                            handle_of(stream),
                            [&](int64_t begin, int64_t end, cudaStream_t branch) {
                              each_job(args, begin, end, [&](const EncodeCall& call, void* state) {
                                if (call.codec.layout.block > 0) {
                                  if (call.opening > 0) {
                                    launch_balance(call, branch);
                                    if (call.shape.narrow_base.any()) {
                                      launch_narrow_base(call, state, branch);
                                    }
                                  }
                                  launch_means(call, branch);
                                }
                                launch_encode(call, branch);
                                launch_tally(call, 1, branch);
                              });
                            });
}

void ParisKVSearch::forget(const EncodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  each_job(args, 0, args.batch,
           [&](const EncodeCall& call, void*) { launch_tally(call, -1, handle_of(stream)); });
}

void ParisKVSearch::add_queries(const ObserveArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  for (int64_t i = 0; i < args.batch; ++i) {
    const ObserveJob& job = args.jobs[i];
    launch_observe({args.shape, job.squares, job.first, rows_of(job.q), job.q.shape[0]},
                   handle_of(stream));
  }
}

DecodeCall ParisKVSearch::call_of(const DecodeArgs& args) const {
  DecodeCall call{};
  static_cast<StepCall&>(call) = step_of(args);
  call.slots = slots_.data();
  call.codec = constants_;
  call.scorer = rules_.scorer;
  call.group_rule = rules_.group_rule;
  call.top_k = rules_.top_k;
  call.searchers = rules_.searchers;
  call.tail_rows = rules_.tail_rows;
  call.bytes = ContextBytes::of(args.shape, rules_.tail_rows);
  call.error_left = rules_.error;
  call.weighs = rules_.error > 0 || args.error.data != nullptr;
  call.looks_beyond = rules_.error > 0;
  call.error = floats_of(args.error), call.error_stride = args.error.strides[0];
  call.heads = args.batch * args.shape.kv_heads;
  call.counters = counters_.data();
  call.over_bus = backend_.rows_leave();
  call.first_step = kScore;
  call.last_step = kAttend;
  return call;
}

void ParisKVSearch::search(const DecodeCall& call, int64_t sequences, bool recorded,
                           cudaStream_t on) {
  // While some heads wait for the bus, the search of other heads goes on. Where the host launches
  // every kernel of every step, a second branch costs it more time than the device saves.
  const int64_t most_branches = recorded ? tuning_.decode_branches : 1;
  const int64_t heads = sequences * shape_.kv_heads;
  backend_.branches().share(heads, tuning_.branch_heads, most_branches, on,
                            [&](int64_t begin, int64_t end, cudaStream_t branch) {
                              DecodeCall share = call;
                              share.batch = sequences;
                              share.first_head = begin;
                              share.heads = end - begin;
                              launch_decode(share, branch);
                            });
}

void ParisKVSearch::decode(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  slots_.check_batch(args.batch);
  if (args.batch == 0) return;
  const bool recorded = backend_.capturing(stream);
  const cudaStream_t own = handle_of(stream);
  if (args.paged != nullptr) return decode_paged(args, recorded, own);
  DecodeCall call = call_of(args);
  const int64_t searched = std::count_if(args.sequences, args.sequences + args.batch,
                                         [](const SequenceView& view) { return !view.dense(); });
  call.dense_apart = searched < args.batch && has_dense(call);
  if (!call.dense_apart) return search(call, args.batch, recorded, own);
  const bool named = args.batch <= kMostDense;
  if (named) call.searched_rows = static_cast<int32_t*>(counters_.beside());
  DenseChoice choice = choice_for(args.batch, named);
  if (!recorded) {
    launch_dense(call, choice, own);
    if (searched > 0) search(call, named ? searched : args.batch, recorded, own);
    return;
  }
  // The graph may be replayed when other sequences are searched, more or fewer.
  Conditional others(own, choice.count);
  choice.condition = others.handle();
  choice.count = others.bodies();
  launch_dense(call, choice, own);
  others.record(inner_,
                [&](int body, cudaStream_t on) { search(call, choice.room[body], recorded, on); });
}

const int32_t* ParisKVSearch::send_page_rows(const PagedRows& table, int64_t batch,
                                             cudaStream_t on) {
  bool in_order = true;
  for (int64_t i = 0; i < batch; ++i) in_order = in_order && table.rows[i] == i;
  if (in_order) return nullptr;
  auto* const rows = static_cast<int32_t*>(counters_.beside()) + kMostNamed;
  launch_set_lengths(rows, nullptr, table.rows, batch, on);
  return rows;
}

void ParisKVSearch::decode_paged(const DecodeArgs& args, bool recorded, cudaStream_t on) {
  const PagedStep& paged = *args.paged;
  const PageFill fill = PageFill::of(paged.table);
  DecodeCall call = call_of(args);
  call.searched_rows = static_cast<int32_t*>(counters_.beside());
  DenseChoice choice = choice_for(args.batch, true);
  if (!recorded) {
    launch_paged_step(call, fill, send_page_rows(paged.table, args.batch, on), choice, on);
    (*paged.dense)();
    if (paged.unserved > 0) search(call, paged.unserved, recorded, on);
    return;
  }
  Conditional others(on, choice.count);
  choice.condition = others.handle();
  choice.count = others.bodies();
  launch_paged_step(call, fill, nullptr, choice, on);
  (*paged.dense)();
  others.record(inner_, [&](int body, cudaStream_t inner) {
    search(call, choice.room[body], recorded, inner);
  });
}

HeadTrace ParisKVSearch::trace_head(const SequenceView& sequence, int64_t head) {
  const ParisKVSlot& slot = slots_.sent_to_explain();
  const HeadScratch& at = slot.scratch;
  const auto at_head = [&](const auto* of_first_head) {
    return reinterpret_cast<const char*>(of_first_head) + head * slot.head_bytes;
  };
  const auto fetch_to = [&](auto& target, const auto* of_first_head, int64_t index, int64_t count) {
    using Element = typename std::decay_t<decltype(target)>::value_type;
    static_assert(std::is_same_v<const Element*, decltype(of_first_head)>);
    target.resize(size_t(count));
    backend_.fetch(target.data(), at_head(of_first_head + index), count * int64_t(sizeof(Element)));
  };
  std::vector<int32_t> count;  // of candidates, and of selected rows
  fetch_to(count, at.candidate_count, 0, 2);

  HeadTrace trace;
  fetch_to(trace.scores, at.scores, sequence.zone_begin % kScoreAlignment, sequence.zone_tokens());
  fetch_to(trace.candidates, at.candidates, 0, count[0]);
  for (int64_t s = 0; s < rules_.searchers; ++s) {
    trace.logits.emplace_back();
    fetch_to(trace.logits.back(), at.estimates, s * slot.candidate_capacity, count[0]);
  }
  std::vector<float> worth;
  fetch_to(worth, at.worth, 0, count[0]);
  fetch_to(trace.selected, at.selected, 0, count[1]);
  std::stable_sort(trace.selected.begin(), trace.selected.end(),
                   [&](int32_t a, int32_t b) { return worth[size_t(a)] > worth[size_t(b)]; });
  for (const int32_t index : trace.selected) trace.worth.push_back(worth[size_t(index)]);
  if (rules_.estimates_error) {
    std::vector<float> reached;
    fetch_to(reached, at.reached, 0, 2);
    trace.mass = reached[0], trace.error = reached[1];
  }
  return trace;
}

ParisKVTrace ParisKVSearch::trace(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(backend_.device());
  DecodeCall call = call_of(args);
  call.explains = true;
  call.weighs = call.looks_beyond = rules_.estimates_error;
  call.slots = slots_.explained();
  call.counters = nullptr;
  launch_decode(call, handle_of(stream));
  wait_for(handle_of(stream), "explain");
  ParisKVTrace trace;
  trace.weighed = rules_.estimates_error;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    trace.heads.push_back(trace_head(args.sequences[0], head));
  }
  return trace;
}

}  // namespace pariskv::cuda
