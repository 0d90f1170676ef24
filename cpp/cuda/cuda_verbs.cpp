// The verbs that every policy shares: arguments of the cache become arguments of a launch.
#include <algorithm>
#include <vector>

#include "cuda_backend.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/** The tokens of each sequence. The device's own table is where views say. */
std::vector<RowsItem> items_of(const RowsArgs& args) {
  std::vector<RowsItem> items;
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.lengths[i] == 0) continue;
    const int32_t page_row = args.paged == nullptr ? 0 : args.paged->rows[i];
    items.push_back({args.sequences[i].device, args.begin[i], args.lengths[i], page_row});
  }
  return items;
}

RowsCall call_of(const RowsArgs& args, const std::vector<RowsItem>& items) {
  return {args.shape,      items.data(),    int64_t(items.size()),
          rows_of(args.k), rows_of(args.v), args.paged ? PageFill::of(*args.paged) : PageFill{}};
}

/** Calls `visit(segment, slot, tokens)` for the part of positions that each segment has. */
template <typename Visit>
void each_piece(const ModelShape& shape, const Positions& positions, Visit visit) {
  for (int64_t begin = positions.begin; begin < positions.end;) {
    const int64_t segment = begin / shape.segment_tokens, first = segment * shape.segment_tokens;
    const int64_t end = std::min(positions.end, first + shape.segment_tokens);
    visit(segment, begin - first, end - begin);
    begin = end;
  }
}

/** Rows of which those of the zone are narrow. */
void read_mixed(const RowsArgs& args, cudaStream_t stream) {
  for (int64_t i = 0, packed = 0; i < args.batch; packed += args.lengths[i++]) {
    const SequenceView& view = args.sequences[i];
    const int64_t first = args.begin[i], end = first + args.lengths[i];
    const auto rows = [&](const TensorView& tensor, int64_t position) {
      return rows_of(tensor, packed + position - first);
    };
    const auto read_plain = [&](int64_t from, int64_t to) {
      if (from >= to) return;
      const RowsItem item{view.device, from, to - from, 0};
      launch_read({args.shape, &item, 1, rows(args.k, from), rows(args.v, from), {}}, stream);
    };
    read_plain(first, std::min(end, view.zone_begin));
    const Positions zone{std::max(first, view.zone_begin), std::min(end, view.zone_end)};
    each_piece(args.shape, zone, [&](int64_t segment, int64_t slot, int64_t count) {
      const int64_t position = segment * args.shape.segment_tokens + slot;
      launch_widen(
          {args.shape, static_cast<const char*>(view.narrow_rows[segment]), view.summaries[segment],
           view[Part::kState], slot, count, rows(args.k, position), rows(args.v, position)},
          stream);
    });
    read_plain(std::max(first, view.zone_end), end);
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
  const std::vector<RowsItem> items = items_of(args);
  launch_append(call_of(args, items), handle_of(stream));
}

void CudaBackend::read(const RowsArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  if (args.shape.narrows()) return read_mixed(args, handle_of(stream));
  const std::vector<RowsItem> items = items_of(args);
  launch_read(call_of(args, items), handle_of(stream));
}

void CudaBackend::narrow(const NarrowArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const NarrowJob& job = args.jobs[i];
    launch_narrow({args.shape, job.sequence.device, job.sequence[Part::kState], job.positions.begin,
                   job.positions.end},
                  handle_of(stream));
  }
}

void CudaBackend::widen(const NarrowArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const SequenceView& view = args.jobs[i].sequence;
    each_piece(args.shape, args.jobs[i].positions,
               [&](int64_t segment, int64_t slot, int64_t count) {
                 char* plain = static_cast<char*>(view.rows[segment]);
                 launch_widen({args.shape, static_cast<const char*>(view.narrow_rows[segment]),
                               view.summaries[segment], view[Part::kState], slot, count,
                               keys_of_segment(args.shape, plain, slot),
                               values_of_segment(args.shape, plain, slot)},
                              handle_of(stream));
               });
  }
}

void CudaBackend::set_lengths(const PagedRows& table, const int32_t* lengths, int64_t count,
                              Stream stream) {
  const DeviceGuard guard(device_);
  launch_set_lengths(table.lengths, table.rows, lengths, count, handle_of(stream));
}

void CudaBackend::copy(void* target, const void* source, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(runtime().copy(target, source, size_t(bytes), handle_of(stream)), "copy a block");
}

void CudaBackend::zero(void* target, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(cudaMemsetAsync(target, 0, size_t(bytes), handle_of(stream)), "zero a block");
}

void CudaBackend::zero(const std::vector<Cleared>& blocks, Stream stream) {
  const DeviceGuard guard(device_);
  for (size_t first = 0; first < blocks.size(); first += size_t(kMostCleared)) {
    const int64_t count = std::min(int64_t(blocks.size() - first), kMostCleared);
    launch_clear(blocks.data() + first, count, handle_of(stream));
  }
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
    call.lse = floats_of(args.lse, packed), call.lse_stride = args.lse.strides[0];
    call.logits = args.logits;
    call.precision = args.precision;
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
  launch_exact_logits({args.shape, args.sequence.device, args.sequence[Part::kState],
                       rows_of(args.q), args.logits, positions.data(), args.width, out.data()},
                      handle);
  check(cudaMemcpyAsync(args.out, out.data(), size_t(numbers) * sizeof(float),
                        cudaMemcpyDeviceToHost, handle),
        "explain");
  wait_for(handle, "explain");
}

}  // namespace pariskv::cuda
