// The verbs: arguments of the cache become arguments of a launch.
#include <algorithm>
#include <numeric>
#include <type_traits>

#include "codec/key_statistics.h"
#include "cuda_backend.h"
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

/** Branches of encoding: what one has at least, and how many there are at most. */
constexpr int64_t kLeastOfEncoder = 4, kMostEncoders = 4;
/** Branches of a decode: heads that one has at least, and how many there are at most. */
constexpr int64_t kLeastHeads = 8, kMostBranches = 2;

/** Calls `launch` for the tokens of each sequence. The device's own table is where views say. */
template <typename Launch>
void each_sequence(const RowsArgs& args, Launch launch) {
  for (int64_t i = 0, packed = 0; i < args.batch; packed += args.lengths[i++]) {
    if (args.lengths[i] == 0) continue;
    launch(RowsCall{args.shape, args.sequences[i].device, args.begin[i], args.lengths[i],
                    rows_of(args.k, packed), rows_of(args.v, packed)});
  }
}

template <typename Launch>
void each_job(const EncodeArgs& args, int64_t begin, int64_t end, Launch launch) {
  for (int64_t i = begin; i < end; ++i) {
    const EncodeJob& job = args.jobs[i];
    if (job.begin >= job.end) continue;
    launch(EncodeCall{args.shape, constants_of(*args.codec), job.sequence.device, job.statistics,
                      job.balance, job.begin, job.end, job.opening, job.heard});
  }
}

/** Memory of the device for the length of a call, filled from the host. */
template <typename T>
class Upload {
 public:
  Upload(Arena& arena, const T* data, int64_t count, cudaStream_t stream)
      : block_(arena.allocate(count * int64_t(sizeof(T)))) {
    check(cudaMemcpyAsync(block_.data(), data, size_t(count) * sizeof(T), cudaMemcpyHostToDevice,
                          stream),
          "copy to the device");
  }
  T* data() const { return block_.as<T>(); }

 private:
  Block block_;
};

}  // namespace

void CudaBackend::append(const RowsArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  each_sequence(args, [&](const RowsCall& call) { launch_append(call, handle_of(stream)); });
}

void CudaBackend::read(const RowsArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  each_sequence(args, [&](const RowsCall& call) { launch_read(call, handle_of(stream)); });
}

void CudaBackend::keep(const KeepArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const KeepJob& job = args.jobs[i];
    launch_keep(
        {args.shape, job.sequence.device, job.tail, job.from, Tail::capacity(args.tail_rows)},
        handle_of(stream));
  }
}

void CudaBackend::copy(void* target, const void* source, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(runtime().copy(target, source, size_t(bytes), handle_of(stream)), "copy a block");
}

void CudaBackend::zero(void* target, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(cudaMemsetAsync(target, 0, size_t(bytes), handle_of(stream)), "zero a block");
}

void CudaBackend::keep_up(const Upkeep& upkeep, Stream stream) {
  std::visit([&](const auto& args) { keep_up(args, stream); }, upkeep);
}

void CudaBackend::keep_up(const ParisKVEncode& args, Stream stream) {
  const DeviceGuard guard(device_);
  // A flush is a few hundred keys of each layer: one after the other they would leave most of the
  // device idle.
  branches_.share(args.batch, kLeastOfEncoder, kMostEncoders, handle_of(stream),
                  [&](int64_t begin, int64_t end, cudaStream_t branch) {
                    each_job(args, begin, end, [&](const EncodeCall& call) {
                      if (call.codec.layout.block > 0) {
                        if (call.opening > 0) launch_balance(call, branch);
                        launch_means(call, branch);
                      }
                      launch_encode(call, branch);
                      launch_tally(call, 1, branch);
                    });
                  });
}

void CudaBackend::keep_up(const ParisKVForget& args, Stream stream) {
  const DeviceGuard guard(device_);
  each_job(args, 0, args.batch,
           [&](const EncodeCall& call) { launch_tally(call, -1, handle_of(stream)); });
}

void CudaBackend::keep_up(const ParisKVObserve& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const ObserveJob& job = args.jobs[i];
    launch_observe(
        {args.shape, job.balance.query_squares, job.first, rows_of(job.q), job.q.shape[0]},
        handle_of(stream));
  }
}

DecodeCall CudaBackend::call_of(const DecodeArgs& args, const ParisKVRules& rules) const {
  DecodeCall call{};
  static_cast<StepCall&>(call) = step_of(args, lanes_.as<Lane>());
  call.codec = constants_of(*rules.codec);
  call.scorer = rules.scorer;
  call.group_rule = rules.group_rule;
  call.top_k = rules.top_k;
  call.searchers = rules.searchers;
  call.tail_rows = rules.tail_rows;
  call.budget = rules.budget;
  call.heads = args.batch * args.shape.kv_heads;
  call.counters = counters_.as<int64_t>();
  call.first_step = kScore;
  call.last_step = kAttend;
  return call;
}

void CudaBackend::decode(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  check_batch(args.batch);  // a recorded decode has not been reserved for
  if (args.batch == 0) return;
  std::visit([&](const auto& rules) { launch(args, rules, stream); }, args.rules);
}

void CudaBackend::launch(const DecodeArgs& args, const ParisKVRules& rules, Stream stream) {
  DecodeCall call = call_of(args, rules);
  // While some heads wait for the bus, the search for others goes on.
  branches_.share(call.heads, kLeastHeads, kMostBranches, handle_of(stream),
                  [&](int64_t begin, int64_t end, cudaStream_t branch) {
                    call.first_head = begin;
                    call.heads = end - begin;
                    launch_decode(call, branch);
                  });
}

HeadTrace CudaBackend::trace_head(const DecodeArgs& args, const ParisKVRules& rules, int64_t head) {
  const Lane& lane = explaining_.sent;
  const HeadScratch& at = lane.scratch;
  const auto at_head = [&](const auto* of_first_head) {
    return reinterpret_cast<const char*>(of_first_head) + head * lane.head_bytes;
  };
  const auto fetch_to = [&](auto& target, const auto* of_first_head, int64_t index, int64_t count) {
    using Element = typename std::decay_t<decltype(target)>::value_type;
    static_assert(std::is_same_v<const Element*, decltype(of_first_head)>);
    target.resize(size_t(count));
    fetch(target.data(), at_head(of_first_head + index), count * int64_t(sizeof(Element)));
  };
  std::vector<int32_t> count, selected;
  fetch_to(count, at.candidate_count, 0, 1);
  fetch_to(selected, at.selected_count, 0, 1);

  HeadTrace trace;
  const SequenceView& sequence = args.sequences[0];
  fetch_to(trace.scores, at.scores, sequence.zone_begin % kScoreAlignment, sequence.zone_tokens());
  fetch_to(trace.candidates, at.candidates, 0, count[0]);
  for (int64_t s = 0; s < rules.searchers; ++s) {
    trace.logits.emplace_back();
    fetch_to(trace.logits.back(), at.estimates, s * lane.candidate_capacity, count[0]);
  }
  std::vector<float> worth;
  fetch_to(worth, at.worth, 0, count[0]);
  fetch_to(trace.selected, at.selected, 0, selected[0]);
  std::stable_sort(trace.selected.begin(), trace.selected.end(),
                   [&](int32_t a, int32_t b) { return worth[size_t(a)] > worth[size_t(b)]; });
  for (const int32_t index : trace.selected) trace.worth.push_back(worth[size_t(index)]);
  if (rules.budget > 0) fetch(&trace.mass, at_head(at.mass), int64_t(sizeof trace.mass));
  return trace;
}

Trace CudaBackend::trace(const DecodeArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  return std::visit([&](const auto& rules) { return trace(args, rules, stream); }, args.rules);
}

Trace CudaBackend::trace(const DecodeArgs& args, const ParisKVRules& rules, Stream stream) {
  DecodeCall call = call_of(args, rules);
  call.explains = true;
  call.lanes = lanes_.as<Lane>() + kMostBatch;
  call.counters = nullptr;
  launch_decode(call, handle_of(stream));
  wait_for(handle_of(stream), "explain");
  ParisKVTrace trace;
  trace.weighed = rules.budget > 0;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    trace.heads.push_back(trace_head(args, rules, head));
  }
  return trace;
}

void CudaBackend::attend_exact(const AttendExactArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0, packed = 0; i < args.batch; packed += args.lengths[i++]) {
    if (args.lengths[i] == 0) continue;
    AttendExactCall call{};
    call.shape = args.shape;
    call.sequence = args.sequences[i].device;
    call.total = call.end = args.sequences[i].total;
    call.tokens = call.call_tokens = args.lengths[i];
    call.q = rows_of(args.q, packed), call.out = rows_of(args.out, packed);
    call.lse = lse_of(args.lse, packed), call.lse_stride = args.lse.strides[0];
    call.logits = args.logits;
    call.shares = 1;
    exact_.attend(call, args.sequences[i], args.hosted[i], handle_of(stream));
  }
}

void CudaBackend::exact_logits(const ExactLogitsArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  const int64_t numbers = args.shape.query_heads() * args.width;
  if (numbers == 0) return;
  const cudaStream_t handle = handle_of(stream);
  const Upload<int32_t> positions(arena_, args.positions, args.shape.kv_heads * args.width, handle);
  const Upload<float> out(arena_, args.out, numbers, handle);  // what has no position stays
  launch_exact_logits({args.shape, args.sequence.device, rows_of(args.q), args.logits,
                       positions.data(), args.width, out.data()},
                      handle);
  check(cudaMemcpyAsync(args.out, out.data(), size_t(numbers) * sizeof(float),
                        cudaMemcpyDeviceToHost, handle),
        "explain");
  wait_for(handle, "explain");
}

}  // namespace pariskv::cuda
