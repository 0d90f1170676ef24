// The verbs that every policy shares: arguments of the cache become arguments of a launch.
#include "cuda_backend.h"
#include "views.h"

namespace pariskv::cuda {

namespace {

/** Calls `launch` for the tokens of each sequence. The device's own table is where views say. */
template <typename Launch>
void each_sequence(const RowsArgs& args, Launch launch) {
  for (int64_t i = 0, packed = 0; i < args.batch; packed += args.lengths[i++]) {
    if (args.lengths[i] == 0) continue;
    launch(RowsCall{args.shape, args.sequences[i].device, args.begin[i], args.lengths[i],
                    rows_of(args.k, packed), rows_of(args.v, packed)});
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

void CudaBackend::copy(void* target, const void* source, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(runtime().copy(target, source, size_t(bytes), handle_of(stream)), "copy a block");
}

void CudaBackend::zero(void* target, int64_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  check(cudaMemsetAsync(target, 0, size_t(bytes), handle_of(stream)), "zero a block");
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
