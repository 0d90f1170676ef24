// A decode step as six kernels: window_logits, score, attend_resident, attend_tail, rerank, attend.
// Each may start while the one before it is at work.
#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "clusters.h"
#include "elements.h"
#include "pariskv/decode/instance.cuh"
#include "runtime.h"

namespace pariskv::cuda {

extern template DecodeKernels decode_kernels<float>(int64_t);
extern template DecodeKernels decode_kernels<__half>(int64_t);
extern template DecodeKernels decode_kernels<__nv_bfloat16>(int64_t);
extern template void set_narrow_kernels<float>(int64_t, DecodeKernels&);
extern template void set_narrow_kernels<__half>(int64_t, DecodeKernels&);
extern template void set_narrow_kernels<__nv_bfloat16>(int64_t, DecodeKernels&);

namespace {

/** The limits of a device for the kernels of one instance. */
struct Fit : Limits {
  int attend_bytes = 0;  // shared memory of a block that attends, if it needs no more
  Clusters clusters;     // of blocks that attend
};

Fit measure(const DecodeKernels& kernels, int device) {
  const void* const attend = kernels.attend.address;
  Fit fit{Limits::of(attend, device), 0, {}};
  for (const void* kernel : {kernels.score[0].address, kernels.score[1].address,
                             kernels.score_votes.address, kernels.rerank.address, attend}) {
    if (kernel != nullptr) allow_shared_bytes(kernel, fit.shared_bytes);
  }
  constexpr int kMostRowBytes = 2 * int(kMaxHeadDim) * 4;
  for (int many = 0; many < 2; ++many) {
    allow_shared_bytes(kernels.attend_resident[many].address,
                       kernels.resident_bytes + kMostRowBytes);
  }
  allow_shared_bytes(kernels.attend_tail.address, kernels.tail_bytes);
  share_carveout({kernels.window_logits.address, kernels.prepare_votes.address,
                  kernels.score_votes.address, kernels.score[0].address, kernels.score[1].address,
                  kernels.attend_resident[0].address, kernels.attend_resident[1].address,
                  kernels.attend_tail.address, kernels.rerank.address, attend});
  fit.attend_bytes = std::min(fit.tuning->attend_bytes, fit.shared_bytes);
  if (fit.early) fit.clusters = Clusters::of(attend, fit.attend_bytes);
  return fit;
}

Fit fit_of(const DecodeKernels& kernels) {
  return measured_once(kernels.attend.address,
                       [&](int device) { return measure(kernels, device); });
}

/**
 * Blocks per head: as many as run at once. Of a batch in branches just enough for all of them to
 * leave no more than a sixteenth of the device idle, so that they run side by side.
 */
int blocks_per_head(const Fit& fit, const DecodeCall& call, int most, int per_processor) {
  const int64_t room = int64_t(fit.multiprocessors) * per_processor;
  const int64_t all_heads = call.batch * call.shape.kv_heads;
  const int64_t at_once = room / call.heads, enough = (room - room / 16 - 1) / all_heads + 1;
  const int64_t blocks = call.heads == all_heads ? at_once : std::min(at_once, enough);
  return int(std::clamp<int64_t>(blocks, 1, most));
}

/** The largest power of two up to `most`. */
int power_within(int most) {
  int power = 1;
  while (2 * power <= most) power *= 2;
  return power;
}

DecodeKernels kernels_of(const DecodeCall& call) {
  return dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    const int64_t dim = call.codec.layout.rotated_dim;
    DecodeKernels kernels = decode_kernels<Element>(dim);
    if (call.shape.narrows()) set_narrow_kernels<Element>(dim, kernels);
    return kernels;
  });
}

/** Whether the query of a searcher is one that lies in whole pieces of 16 bytes. */
bool queries_in_pieces(const DecodeCall& call) {
  const auto bytes = [&](int64_t elements) {
    return uint64_t(elements * size_of(call.shape.dtype));
  };
  const uint64_t all = reinterpret_cast<uintptr_t>(call.q.data) | bytes(call.q.stride_i) |
                       bytes(call.q.stride_j) | bytes(call.shape.rows.key_dim);
  return all % 16 == 0 && call.scorer == Scorer::kSignNorm &&
         call.group_rule != GroupRule::kMeanQuery;
}

int resident_bytes(const DecodeKernels& kernels, const ModelShape& shape) {
  const int row = kernels.resident_row ? int(shape.rows.bytes()) : 0;
  return (kernels.resident_bytes + row + 127) / 128 * 128;
}

/** The number of a step, for its flags. */
uint32_t next_token() {
  static std::atomic<uint32_t> last{0};
  uint32_t token = 0;
  while (token == 0) token = ++last;
  return token;
}

/** One step of one call, and its launches. */
class Step {
 public:
  Step(const DecodeCall& call, cudaStream_t stream)
      : call_(call),
        stream_(stream),
        kernels_(kernels_of(call)),
        fit_(fit_of(kernels_)),
        common_{call, device::SegmentDivisor::of(call.shape.segment_tokens),
                device::IndexDivisor::of(call.shape.kv_heads), next_token()},
        score_blocks_(
            blocks_per_head(fit_, call, device::kMostScoreBlocks, fit_.tuning->scores_per_sm)),
        rerank_blocks_(blocks_per_head(fit_, call, device::kSlices, fit_.tuning->reranks_per_sm)),
        resident_blocks_(power_within(std::min(rerank_blocks_, device::kParts))),
        // Blocks of attend find room beside those that rerank.
        sets_flags_(fit_.early && kernels_.attend_beside) {}

  void run() const {
    if (runs(kScore)) {
      call_.scorer == Scorer::kVotes ? score_by_votes() : score();
    }
    if (runs(kRerank)) {
      attend_resident();
      attend_tail();
      rerank();
    }
    if (runs(kAttend)) attend();
  }

 private:
  bool runs(DecodeStep step) const { return call_.first_step <= step && step <= call_.last_step; }

  void score() const {
    const int window_blocks = call_.searchers > 1 ? kWindowBlocks : 0;
    const int mean_blocks =
        call_.codec.layout.block == 0
            ? 0
            : blocks_per_head(fit_, call_, kMostMeanBlocks, fit_.tuning->means_per_sm);
    const int looking = window_blocks + mean_blocks;
    if (looking > 0) {
      Launch(call_.heads * looking, 0, stream_)
          .run(kernels_.window_logits,
               WindowParams{common_, window_blocks, mean_blocks, device::IndexDivisor::of(looking)},
               "decode: window_logits");
    }
    const ScoreParams params{common_, score_blocks_, device::IndexDivisor::of(score_blocks_),
                             queries_in_pieces(call_)};
    const bool has_blocks = call_.codec.layout.block > 0;
    Launch(call_.heads * score_blocks_, kernels_.score_bytes[has_blocks], stream_)
        .early(fit_.early && looking > 0)
        .run(kernels_.score[has_blocks], params, "decode: score");
  }

  void score_by_votes() const {
    const int packed_bytes = kernels_.votes_bytes + 4 * kernels_.table_bytes;
    const bool packed = call_.searchers > 1 && packed_bytes <= fit_.shared_bytes;
    const VotesParams params{common_, score_blocks_, device::IndexDivisor::of(score_blocks_),
                             packed};
    Launch(call_.heads * score_blocks_, 0, stream_)
        .run(kernels_.prepare_votes, params, "decode: prepare_votes");
    Launch(call_.heads * score_blocks_,
           packed ? packed_bytes : kernels_.votes_bytes + kernels_.table_bytes, stream_)
        .early(fit_.early)
        .run(kernels_.score_votes, params, "decode: score_votes");
  }

  void attend_resident() const {
    const ResidentParams params{common_, resident_blocks_, device::IndexDivisor::of(call_.heads),
                                sets_flags_};
    const bool many = device::kParts / resident_blocks_ >= kManyParts;
    const int64_t blocks = call_.heads * resident_blocks_;
    Launch(blocks, resident_bytes(kernels_, call_.shape), stream_, kernels_.resident_threads)
        .early(fit_.early && runs(kScore))
        .run(kernels_.attend_resident[many], params, "decode: attend_resident");
  }

  void attend_tail() const {
    if (call_.tail_rows == 0) return;
    // Small blocks that wait for memory: twice as many as those of resident rows.
    const int blocks = std::min(2 * resident_blocks_, device::kParts);
    const ResidentParams params{common_, blocks, device::IndexDivisor::of(call_.heads), false};
    Launch(call_.heads * blocks, kernels_.tail_bytes, stream_, kernels_.resident_threads)
        .early(fit_.early)
        .run(kernels_.attend_tail, params, "decode: attend_tail");
  }

  void rerank() const {
    const int64_t blocks = call_.heads * rerank_blocks_;
    const int64_t room = int64_t(fit_.multiprocessors) * fit_.tuning->reranks_per_sm;
    const int64_t most =
        fit_.early ? std::min<int64_t>(fit_.tuning->warmup_blocks, call_.heads) : 0;
    const int warmup_blocks = int(std::clamp<int64_t>(room - blocks, 0, most));
    const RerankParams params{
        common_,       warmup_blocks, rerank_blocks_, device::IndexDivisor::of(rerank_blocks_),
        score_blocks_, runs(kScore),  sets_flags_};
    Launch(warmup_blocks + blocks, kernels_.rerank_bytes, stream_)
        .early(fit_.early)
        .run(kernels_.rerank, params, "decode: rerank");
  }

  void attend() const {
    const int size = fit_.clusters.size_for(call_.heads, fit_, call_.over_bus);
    const int bytes = std::max(fit_.attend_bytes, kernels_.attend_space + kernels_.attend_least +
                                                      head_sums_bytes(int(call_.shape.group)));
    // With more heads, rows of one head keep the bus busy while another is searched. Under a budget
    // even the best rows may not be wanted.
    const bool early =
        call_.batch * call_.shape.kv_heads * size <= fit_.multiprocessors && call_.error_left == 0;
    const AttendParams params{
        common_, size, bytes, rerank_blocks_, resident_blocks_, sets_flags_ && runs(kRerank),
        early};
    Launch(call_.heads * size, bytes, stream_)
        .clusters_of(size)
        .early(fit_.early && runs(kRerank))
        .run(kernels_.attend, params, "decode: attend");
  }

  const DecodeCall& call_;
  const cudaStream_t stream_;
  const DecodeKernels kernels_;
  const Fit fit_;
  const StepParams common_;
  int score_blocks_, rerank_blocks_, resident_blocks_;  // per kv head
  bool sets_flags_;
};

/** How attend_dense is launched on the current device. */
struct DenseLaunch {
  Kernel<DenseParams> kernel;
  int bytes = 0;
  int blocks = 0;  // 0: not at all
};

/** Rows whose halves the tensor cores take in whole steps, and as many heads. */
bool suits_dense(const ModelShape& shape) {
  const RowFormat& rows = shape.rows;
  return size_of(shape.dtype) == 2 && rows.key_dim % 16 == 0 && rows.value_dim % 16 == 0 &&
         rows.value_dim <= rows.key_dim && rows.key_dim <= 32 * kMostDenseWords &&
         shape.group <= kMostDenseHeads;
}

DenseKind dense_kind(const ModelShape& shape, int known_dim) {
  const RowFormat& rows = shape.rows;
  if (rows.key_dim != known_dim || rows.value_dim != known_dim) return kAnyHeads;
  return shape.group <= 4 ? kFourHeads : shape.group <= 8 ? kEightHeads : kSixteenHeads;
}

DenseLaunch dense_launch(const DecodeCall& call) {
  DenseLaunch launch;
  if (!suits_dense(call.shape)) return launch;
  const DecodeKernels kernels = kernels_of(call);
  const RowFormat& rows = call.shape.rows;
  launch.kernel = kernels.attend_dense[dense_kind(call.shape, kernels.dense_dim)];
  const int stages = kDenseWarps * kDenseStages * dense_stage_bytes(int(rows.bytes()));
  launch.bytes = kernels.dense_space + stages;
  const void* const kernel = launch.kernel.address;
  const Limits limits = measured_once(kernel, [&](int device) {
    const Limits asked = Limits::of(kernel, device);
    allow_shared_bytes(kernel, asked.shared_bytes);
    share_carveout({kernel});
    return asked;
  });
  // A processor has 1 KB more than a block can have, and takes as much for each.
  const int each = 2 * launch.bytes + 1024 <= limits.shared_bytes ? 2 : 1;
  if (launch.bytes <= limits.shared_bytes) launch.blocks = each * limits.multiprocessors;
  return launch;
}

}  // namespace

bool has_dense(const DecodeCall& call) { return dense_launch(call).blocks > 0; }

void launch_dense(const DecodeCall& call, const DenseChoice& choice, cudaStream_t stream) {
  const DenseLaunch launch = dense_launch(call);
  for (int64_t first = 0; first < call.batch; first += kMostDense) {
    const DenseParams params{{call, device::SegmentDivisor::of(call.shape.segment_tokens),
                              device::IndexDivisor::of(call.shape.kv_heads), 0},
                             int(first),
                             int(std::min<int64_t>(call.batch - first, kMostDense)),
                             choice};
    Launch(launch.blocks, launch.bytes, stream, kDenseThreads)
        .run(launch.kernel, params, "decode: attend_dense");
  }
}

void launch_decode(const DecodeCall& call, cudaStream_t stream) {
  if (call.heads > 0) Step(call, stream).run();
}

SlotScratch lay_out_scratch(char* base, const ModelShape& shape, const ParisKVRules& rules,
                            int64_t zone_capacity, int64_t candidate_capacity) {
  const SummaryLayout& layout = rules.codec->layout;
  const int64_t searchers = rules.searchers;
  uintptr_t next = reinterpret_cast<uintptr_t>(base);
  const auto take = [&](auto*& array, int64_t count) {
    using Array = std::remove_reference_t<decltype(array)>;
    const int64_t bytes = count * int64_t(sizeof *array);
    array = reinterpret_cast<Array>(next);
    next += uintptr_t((bytes + 255) / 256 * 256);
  };
  const int64_t parts = device::kParts * shape.group * (2 + shape.rows.value_dim);
  const int64_t rows = std::min(rules.top_k, candidate_capacity);
  HeadScratch at{};
  // Nothing of a sequence that is attended to in full is counted, fetched or drawn.
  const bool searched = candidate_capacity > 0;
  // The zone may begin within the first alignment, and is scored in units of it.
  take(at.scores, (zone_capacity + 2 * kScoreAlignment) / kScoreAlignment * kScoreAlignment);
  take(at.counts, searched ? device::kMostScoreBlocks : 0);
  take(at.flags, ReadyFlags::kCount);
  take(at.masses, device::kSlices * shape.group);
  take(at.windows, shape.group * kWindowRows);
  const int64_t blocks =
      layout.block == 0 ? 0 : (zone_capacity + 2 * kScoreAlignment) / layout.block + 2;
  const int64_t chunks = blocks == 0 ? 0 : blocks / kChunkBlocks + 2;
  take(at.block_steps, blocks * steps_pitch(int(searchers)));
  take(at.chunks, chunks * searchers);
  take(at.chunk_flags, chunks);
  take(at.votes, rules.scorer == Scorer::kVotes ? searchers * layout.subspaces() * 256 : 0);
  take(at.candidates, candidate_capacity);
  take(at.estimates, searchers * candidate_capacity);
  take(at.worth, candidate_capacity);
  take(at.selected, rows);
  take(at.rows, rows);
  if (searched && rules.estimates_error) {
    const int64_t bins = rules.error > 0 ? device::kMaxCluster * kWorthBins : 0;
    take(at.bin_squares, bins + bins / 2);
    take(at.totals, 2 * device::kMaxCluster);
    take(at.scales, candidate_capacity);
    take(at.squares, candidate_capacity);
    take(at.errors, shape.group);
    take(at.reached, 2);
  }
  take(at.candidate_count, 2);
  take(at.pieces_ended, shape.group);
  take(at.resident, parts);
  take(at.fetched, searched ? parts : 0);
  take(at.sampled, searched && rules.tail_rows > 0 ? parts : 0);
  take(at.tail_logits, searched ? Tail::capacity(rules.tail_rows) * shape.group : 0);
  return {at, int64_t(next - reinterpret_cast<uintptr_t>(base))};
}

}  // namespace pariskv::cuda
