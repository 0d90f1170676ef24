// A choice of kept rows as six kernels, each launched while the one before is at work and waiting
// for its end; and kept rows of a zone that was cut.
#include <algorithm>

#include "elements.h"
#include "kept/keep/choose/kernel.cuh"
#include "kept/keep/fill/kernel.cuh"
#include "kept/keep/list/kernel.cuh"
#include "kept/keep/look/kernel.cuh"
#include "kept/keep/pieces.h"
#include "kept/keep/share/kernel.cuh"
#include "kept/keep/trim/kernel.cuh"
#include "kept/keep/weigh/kernel.cuh"
#include "kernel_limits.h"
#include "launch.h"
#include "runtime.h"

namespace pariskv::cuda {

ChoiceScratch choice_scratch(const ModelShape& shape, int64_t width, int64_t before_capacity,
                             int64_t after_capacity) {
  ChoiceScratch scratch{};
  const auto take = [&](int64_t& at, int64_t bytes) { take_scratch(at, scratch.bytes, bytes); };
  scratch.width = (width + 3) / 4 * 4;
  take(scratch.head, sizeof(ChosenHead));
  take(scratch.reference, shape.rows.key_dim * 4);
  const int64_t queries = padded_queries(shape.recent * shape.group);
  take(scratch.query_heads, queries * int64_t(sizeof(QueryHead)));
  take(scratch.packed, queries * packed_bytes(shape.rows.key_dim));
  take(scratch.sources, before_capacity * 4);
  take(scratch.logits, shape.recent * scratch.width * 4);
  take(scratch.reciprocals, shape.recent * 16);
  take(scratch.usable, scratch.width);
  take(scratch.shares, scratch.width * 8);
  take(scratch.ranks, scratch.width * 8);
  take(scratch.picked, after_capacity * 4);
  return scratch;
}

namespace {

/** Gives look_at_keys its shared memory, once. Returns whether kernels start early. */
bool prepare(const void* look, int bytes) {
  return measured_once(look, [&](int) {
    check(cudaFuncSetAttribute(look, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "keep: look_at_keys");
    return starts_early(look);
  });
}

}  // namespace

void launch_choice(const ChoiceCall& call, cudaStream_t stream) {
  const ChoiceParams params{call, device::SegmentDivisor::of(call.shape.segment_tokens),
                            device::IndexDivisor::of(call.heads)};
  const unsigned items = unsigned(call.count * call.heads);
  int64_t asked = 0, rows = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    asked = std::max(asked, call.jobs[i].asked.end - call.jobs[i].asked.begin);
    rows = std::max(rows, call.jobs[i].after_capacity);
  }
  const int64_t width = call.scratch.width;
  const int bytes = int(sizeof(LookSpace)) + kLookRows * key_pitch(int(call.shape.rows.key_dim));
  bool early = false;
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    Launch(dim3(items, 1 + kPackBlocks), 0, stream, kListThreads)
        .run(Kernel<ChoiceParams>(list_rows<Element>), params, "keep: list_rows");
    dispatch_chunks(call.shape.rows.key_dim, [&](auto chunks) {
      constexpr int kChunks = int(decltype(chunks)::kValue);
      const Kernel<ChoiceParams> kernel = look_at_keys<Element, kChunks>;
      const int most = int(sizeof(LookSpace)) + kLookRows * key_pitch(128 * kChunks);
      early = prepare(kernel.address, most);
      Launch(dim3(pieces(width, kLookRows), items), bytes, stream, kLookThreads)
          .early(early)
          .run(kernel, params, "keep: look_at_keys");
    });
  });
  Launch(dim3(unsigned(asked), items), 0, stream, kWeighThreads)
      .early(early)
      .run(Kernel<ChoiceParams>(weigh_rows), params, "keep: weigh_rows");
  Launch(dim3(pieces(width, kShareRows), items), 0, stream, kShareThreads)
      .early(early)
      .run(Kernel<ChoiceParams>(share_out), params, "keep: share_out");
  Launch(items, 0, stream, kChooseThreads)
      .early(early)
      .run(Kernel<ChoiceParams>(choose_rows), params, "keep: choose_rows");
  Launch(dim3(pieces(rows, kFillRows), items), 0, stream, kFillThreads)
      .early(early)
      .run(Kernel<ChoiceParams>(fill_block), params, "keep: fill_block");
}

void launch_trim(const TrimCall& call, cudaStream_t stream) {
  const TrimParams params{call};
  const dim3 grid(pieces(call.after_capacity, kFillRows), unsigned(call.shape.kv_heads));
  trim_block<<<grid, kFillThreads, 0, stream>>>(params);
  check_launch("keep: trim_block");
}

}  // namespace pariskv::cuda
