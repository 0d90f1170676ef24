// A choice of kept rows as six kernels, one after the other; and kept rows of a zone that was cut.
#include <algorithm>

#include "elements.h"
#include "hardkv/keep/choose/kernel.cuh"
#include "hardkv/keep/fill/kernel.cuh"
#include "hardkv/keep/list/kernel.cuh"
#include "hardkv/keep/look/kernel.cuh"
#include "hardkv/keep/share/kernel.cuh"
#include "hardkv/keep/trim/kernel.cuh"
#include "hardkv/keep/weigh/kernel.cuh"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

unsigned pieces(int64_t count, int64_t size) { return unsigned((count + size - 1) / size); }

/** Calls visit(Constant<chunks>{}) for as many times 128 channels as a key has. */
template <typename Visit>
void dispatch_chunks(int64_t key_dim, Visit visit) {
  dispatch(Sizes<1, 2, 4>{}, least_of(Sizes<1, 2, 4>{}, (key_dim + 127) / 128), visit);
}

}  // namespace

ChoiceScratch choice_scratch(const ModelShape& shape, int64_t width, int64_t before_capacity,
                             int64_t after_capacity) {
  ChoiceScratch scratch{};
  const auto take = [&](int64_t& at, int64_t bytes) {
    at = scratch.bytes;
    scratch.bytes += (bytes + 255) / 256 * 256;
  };
  scratch.width = (width + 3) / 4 * 4;
  take(scratch.head, sizeof(ChosenHead));
  take(scratch.reference, shape.rows.key_dim * 4);
  take(scratch.voices, shape.recent * shape.group * int64_t(sizeof(Voice)));
  take(scratch.sources, before_capacity * 4);
  take(scratch.logits, shape.recent * scratch.width * 4);
  take(scratch.reciprocals, shape.recent * 16);
  take(scratch.usable, scratch.width);
  take(scratch.shares, scratch.width * 8);
  take(scratch.ranks, scratch.width * 8);
  take(scratch.picked, after_capacity * 4);
  return scratch;
}

void launch_choice(const ChoiceCall& call, cudaStream_t stream) {
  const ChoiceParams params{call, device::SegmentDivisor::of(call.shape.segment_tokens),
                            device::IndexDivisor::of(call.heads)};
  const unsigned items = unsigned(call.count * call.heads);
  int64_t asked = 0, rows = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    asked = std::max(asked, call.jobs[i].asked.end - call.jobs[i].asked.begin);
    rows = std::max(rows, call.jobs[i].after_capacity);
  }
  const dim3 looks(pieces(call.scratch.width, kLookRows), items);
  const dim3 shares(pieces(call.scratch.width, kShareRows), items);
  const int bytes = int(sizeof(LookSpace)) + kLookRows * key_pitch(int(call.shape.rows.key_dim));
  dispatch_element(call.shape.rows.dtype, [&](auto element) {
    using Element = decltype(element);
    list_rows<Element><<<items, kListThreads, 0, stream>>>(params);
    check_launch("keep: list_rows");
    dispatch_chunks(call.shape.rows.key_dim, [&](auto chunks) {
      const auto kernel = look_at_keys<Element, int(decltype(chunks)::kValue)>;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "keep: look_at_keys");
      kernel<<<looks, kLookThreads, bytes, stream>>>(params);
    });
  });
  check_launch("keep: look_at_keys");
  weigh_rows<<<dim3(unsigned(asked), items), kWeighThreads, 0, stream>>>(params);
  check_launch("keep: weigh_rows");
  share_out<<<shares, kShareThreads, 0, stream>>>(params);
  check_launch("keep: share_out");
  choose_rows<<<items, kChooseThreads, 0, stream>>>(params);
  check_launch("keep: choose_rows");
  fill_block<<<dim3(pieces(rows, kFillRows), items), kFillThreads, 0, stream>>>(params);
  check_launch("keep: fill_block");
}

void launch_trim(const TrimCall& call, cudaStream_t stream) {
  const TrimParams params{call};
  const dim3 grid(pieces(call.after_capacity, kFillRows), unsigned(call.shape.kv_heads));
  trim_block<<<grid, kFillThreads, 0, stream>>>(params);
  check_launch("keep: trim_block");
}

}  // namespace pariskv::cuda
