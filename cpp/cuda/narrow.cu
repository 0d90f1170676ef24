// Rows of a zone from plain ones to 8 bits and back: a warp has a row.
#include "elements.h"
#include "kernels.h"
#include "runtime.h"
#include "zone_row.cuh"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWarpsOfBlock = kThreads / 32;

template <typename Element>
__global__ void __launch_bounds__(kThreads) narrow_rows(NarrowCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t position = call.begin + index / shape.kv_heads;
  if (position >= call.end) return;
  const int head = int(index % shape.kv_heads);
  const HeadRows<Element> plain(shape, *call.sequence, nullptr, head, false);
  const HeadRows<Element> narrow(shape, *call.sequence, call.state, head, true);
  const auto from = plain.row(position), to = narrow.row(position);
  const NarrowBase& base = narrow.base;
  const int key_dim = int(shape.rows.key_dim), value_dim = int(shape.rows.value_dim);
  LaneWords words;
  bool bare = false;
  each_word(key_dim, words, [&](int d, float (&x)[kAtOnce]) { plain.key(from, d, x); });
  if (base.any()) {
    float before = 0, after = 0;  // the largest with centre and mean, and without
    each_word(key_dim, words, [&](int d, float (&x)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float whole = base.of_key_left(d + i, 0)(x[i]);
        before = fmaxf(before, fabsf(whole));
        const float left = base.of_key_left(d + i, base.of_key(to.mean, d + i))(x[i]);
        after = fmaxf(after, fabsf(left));
      }
    });
    bare = warp_max(before) < warp_max(after);
    each_word(key_dim, words, [&](int d, float (&x)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[i] = base.of_key_left(d + i, bare ? 0.0f : base.of_key(to.mean, d + i))(x[i]);
      }
    });
  }
  write_narrow(key_dim, words, bare, const_cast<char*>(to.key));
  each_word(value_dim, words, [&](int d, float (&x)[kAtOnce]) {
    plain.value(from, d, x);
    if (!base.any()) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = base.of_value_left(d + i)(x[i]);
  });
  write_narrow(value_dim, words, false, const_cast<char*>(to.value));
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) widen_rows(WidenCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t i = index / shape.kv_heads;
  if (i >= call.tokens) return;
  const int head = int(index % shape.kv_heads);
  // The tables of one segment, as a sequence has them of all.
  SequenceView own{};
  void* const rows[] = {const_cast<char*>(call.segment)};
  uint8_t* const summaries[] = {call.summaries};
  own.narrow_rows = rows, own.summaries = summaries;
  const HeadRows<Element> narrow(shape, own, call.state, head, true);
  const auto row = narrow.row(call.slot + i);
  const auto to = [&](const Rows& tensor) {
    return reinterpret_cast<Element*>(tensor.data) + i * tensor.stride_i + head * tensor.stride_j;
  };
  for (int d = lane_id() * kAtOnce; d < int(shape.rows.key_dim); d += 32 * kAtOnce) {
    float x[kAtOnce];
    narrow.key(row, d, x);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) to(call.k)[d + e] = from_float<Element>(x[e]);
  }
  for (int d = lane_id() * kAtOnce; d < int(shape.rows.value_dim); d += 32 * kAtOnce) {
    float x[kAtOnce];
    narrow.value(row, d, x);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) to(call.v)[d + e] = from_float<Element>(x[e]);
  }
}

unsigned blocks_of(int64_t rows) { return unsigned((rows + kWarpsOfBlock - 1) / kWarpsOfBlock); }

}  // namespace

void launch_narrow(const NarrowCall& call, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const unsigned blocks = blocks_of((call.end - call.begin) * call.shape.kv_heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    narrow_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("rows to 8 bits");
}

void launch_widen(const WidenCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const unsigned blocks = blocks_of(call.tokens * call.shape.kv_heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    widen_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("rows from 8 bits");
}

}  // namespace pariskv::cuda
