// A choice of kept rows from all of a zone: the attention of every kv head's queries, some heads at
// a time, to all rows or of the best pages; how the budget is split; the best rows; the pages that
// they leave. Each kernel is launched while the one before is at work and waits for its end.
#include <algorithm>

#include "elements.h"
#include "kept/keep/fill/kernel.cuh"
#include "kept/keep/pieces.h"
#include "launch.h"
#include "prkv/keep/agree/kernel.cuh"
#include "prkv/keep/amend/kernel.cuh"
#include "prkv/keep/copy/kernel.cuh"
#include "prkv/keep/filter/kernel.cuh"
#include "prkv/keep/list/kernel.cuh"
#include "prkv/keep/look/kernel.cuh"
#include "prkv/keep/share/kernel.cuh"
#include "prkv/keep/split/kernel.cuh"
#include "prkv/keep/weigh/kernel.cuh"
#include "runtime.h"
#include "tuning.h"

namespace pariskv::cuda {

namespace {

/** Launches the kernels of a choice, one after the other. */
struct Sequence {
  const PRKVChoiceParams& params;
  cudaStream_t stream;
  int64_t pages;  // of a zone, if the best are looked at
  cudaEvent_t bus;
  bool early;
  const Tuning& tuning;

  const ChoiceCall& call() const { return params.choice.call; }
  unsigned items() const { return unsigned(call().count * call().heads); }

  template <typename Params>
  void run(Kernel<Params> kernel, dim3 grid, int bytes, int threads, const Params& own,
           const char* what, bool may_be_early = true) const {
    if (bytes > 0) {
      check(
          cudaFuncSetAttribute(kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          what);
    }
    Launch(grid, bytes, stream, threads).early(early && may_be_early).run(kernel, own, what);
  }

  /** The rows that they look at, if not at all. */
  template <int kChunks>
  void find_pages() const {
    const int dim = int(call().shape.rows.key_dim);
    const dim3 tiles(pieces(pages, kRowsOfTile<true>), items());
    run(Kernel<PRKVChoiceParams>(look_at_pages<kChunks>), tiles, look_zone_bytes<true>(dim),
        kLookThreads, params, "keep: look_at_pages");
    run(Kernel<PRKVChoiceParams>(weigh_zone<kChunks, true>), tiles, tile_bytes<true>(dim),
        kLookThreads, params, "keep: weigh_pages");
    run(Kernel<PRKVChoiceParams>(share_zone<kChunks, true>), tiles, tile_bytes<true>(dim),
        kLookThreads, params, "keep: share_pages");
    run(Kernel<PRKVChoiceParams>(list_looked_at), items(), 0, kChooseThreads, params,
        "keep: list_looked_at");
  }

  /** The keys of listed rows, when those of the choice before are there: both would be late. */
  void copy() const {
    check(cudaStreamWaitEvent(stream, bus, 0), "keep: copy_listed");
    const dim3 blocks(std::max(unsigned(tuning.listed_copy_blocks) / items(), 1u), items());
    run(Kernel<PRKVChoiceParams>(copy_listed), blocks, 0, kCopyThreads, params, "keep: copy_listed",
        false);
    check(cudaEventRecord(bus, stream), "keep: copy_listed");
  }

  /** The attention of the queries of some kv heads. */
  template <typename Element>
  void look() const {
    const int dim = int(call().shape.rows.key_dim);
    const dim3 tiles(pieces(call().scratch.width, kLookRows), items());
    run(Kernel<PRKVChoiceParams>(list_zone<Element>), dim3(items(), 1 + kPackBlocks), 0,
        kListThreads, params, "keep: list_zone", false);
    dispatch_chunks(dim, [&](auto chunks) {
      constexpr int kChunks = int(decltype(chunks)::kValue);
      if (pages > 0) find_pages<kChunks>();
      if (params.copied) copy();
      // A kernel that waits for the bus would hold room of another choice.
      run(Kernel<PRKVChoiceParams>(look_at_zone<Element, kChunks>), tiles,
          look_zone_bytes<false>(dim), kLookThreads, params, "keep: look_at_zone", !params.copied);
      if (params.compares) {
        run(Kernel<PRKVChoiceParams>(compare_queries<kChunks>), tiles, tile_bytes<false>(dim),
            kLookThreads, params, "keep: compare_queries");
        run(Kernel<PRKVChoiceParams>(count_agreed), dim3(unsigned(call().shape.group), items()), 0,
            kChooseThreads, params, "keep: count_agreed");
      }
      run(Kernel<PRKVChoiceParams>(weigh_zone<kChunks, false>), tiles, tile_bytes<false>(dim),
          kLookThreads, params, "keep: weigh_zone");
      run(Kernel<PRKVChoiceParams>(share_zone<kChunks, false>), tiles, tile_bytes<false>(dim),
          kLookThreads, params, "keep: share_zone");
    });
  }

  /** Blocks are filled, of these kv heads. */
  template <typename Element>
  void fill() const {
    int64_t rows = 0;
    for (int64_t i = 0; i < call().count; ++i) {
      rows = std::max(rows, call().jobs[i].after_capacity);
    }
    if (params.compares) {
      run(Kernel<PRKVChoiceParams>(split_budget), unsigned(call().count), 0, kSplitThreads, params,
          "keep: split_budget");
    }
    run(Kernel<ChoiceParams>(choose_rows), items(), 0, kChooseThreads, params.choice,
        "keep: choose_rows");
    run(Kernel<ChoiceParams>(fill_block), dim3(pieces(rows, kFillRows), items()), 0, kFillThreads,
        params.choice, "keep: fill_block");
    if (!params.rules.has_pages()) return;
    run(Kernel<PRKVChoiceParams>(list_pages), items(), 0, kChooseThreads, params,
        "keep: list_pages");
    dispatch(Sizes<8, 16, 32, 64>{}, params.rules.page, [&](auto page) {
      run(Kernel<PRKVChoiceParams>(amend_pages<Element, int(decltype(page)::kValue)>),
          dim3(unsigned(rows), items()), 0, digest_threads(int(call().shape.rows.key_dim)), params,
          "keep: amend_pages");
    });
  }
};

}  // namespace

ChoiceScratch prkv_choice_scratch(const ModelShape& shape, int64_t width, int64_t after_capacity,
                                  bool listed) {
  ChoiceScratch scratch{};
  const auto take = [&](int64_t& at, int64_t bytes) { take_scratch(at, scratch.bytes, bytes); };
  scratch.width = (width + 3) / 4 * 4;
  take(scratch.head, sizeof(ChosenHead));
  take(scratch.reference, shape.rows.key_dim * 4);
  const int64_t queries = padded_queries(shape.recent * shape.group);
  take(scratch.query_heads, queries * int64_t(sizeof(QueryHead)));
  take(scratch.packed, queries * packed_bytes(shape.rows.key_dim));
  if (listed) {
    take(scratch.listed, scratch.width * 4);
    take(scratch.sources, scratch.width * 4);
    take(scratch.whole, after_capacity * 4);
  }
  take(scratch.ranks, scratch.width * 8);
  take(scratch.picked, after_capacity * 4);
  take(scratch.agreed, shape.group * 4);
  return scratch;
}

LookScratch look_scratch(const ModelShape& shape, int64_t width, bool compares, bool listed) {
  LookScratch scratch{};
  const auto take = [&](int64_t& at, int64_t bytes) { take_scratch(at, scratch.bytes, bytes); };
  width = (width + 3) / 4 * 4;
  take(scratch.keys, width * packed_bytes(shape.rows.key_dim));
  take(scratch.steps, width * 4);
  take(scratch.copies, listed ? width * shape.rows.key_bytes() : 0);
  take(scratch.tallies, padded_queries(shape.recent * shape.group) * int64_t(sizeof(Tally)));
  take(scratch.ends, shape.group * 8);
  take(scratch.logits, compares ? shape.group * 2 * width * 4 : 0);
  return scratch;
}

void launch_prkv_choice(const PRKVChoiceCall& call, cudaStream_t stream) {
  PRKVChoiceParams params{};
  params.choice = {call.choice, device::SegmentDivisor::of(call.choice.shape.segment_tokens),
                   device::IndexDivisor::of(call.choice.heads)};
  params.rules = call.rules;
  params.compares = call.compares;
  params.copied = call.bus != nullptr && call.pages > 0;
  params.look = call.look;
  params.look_space = call.look_space;
  std::copy_n(call.before, call.choice.count, params.before);
  std::copy_n(call.wanted, call.choice.count, params.wanted);
  const bool early = starts_early(reinterpret_cast<const void*>(fill_block));
  int device = 0;
  check(cudaGetDevice(&device), "ask for the device");
  const Tuning& tuning = tuning_of(device);
  dispatch_element(call.choice.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    PRKVChoiceParams some = params;
    for (int64_t first = 0; first < call.choice.heads; first += call.heads_at_once) {
      ChoiceCall& own = some.choice.call;
      own.first_head = first;
      own.heads = std::min(call.heads_at_once, call.choice.heads - first);
      own.space =
          call.choice.space + first * call.choice.scratch.bytes;  // there is one job, or all
      some.choice.by_heads = device::IndexDivisor::of(own.heads);
      const Sequence sequence{some, stream, call.pages, call.bus, early, tuning};
      sequence.template look<Element>();
      // Scratch has the keys of these heads now. How queries of a prompt agree says how all heads
      // are to be filled.
      if (!call.compares) sequence.template fill<Element>();
    }
    if (call.compares) {
      Sequence{params, stream, call.pages, call.bus, early, tuning}.template fill<Element>();
    }
  });
}

}  // namespace pariskv::cuda
