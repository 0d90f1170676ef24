// Races proven away: a copy waits for what it copies, a block for its last reader. Each proof has
// a control without the ordering that must fail, or the proof would prove nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "cuda_support.h"
#include "memory.h"
#include "memory/arena.h"
#include "offload.h"
#include "order.h"
#include "pinned.h"

namespace pariskv::cuda {
namespace {

using test::must;

constexpr size_t kBytes = size_t{1} << 20;
constexpr int kOld = 0x11, kNew = 0x22;

/** Nothing that the stream is given from now on happens for a while. */
void hold_up(cudaStream_t stream, std::chrono::milliseconds* time) {
  must(cudaLaunchHostFunc(
      stream, [](void* data) { std::this_thread::sleep_for(*static_cast<decltype(time)>(data)); },
      time));
}

/** Host memory as the store has it, or pinned, so that the runtime's copies to it do not wait. */
class HostMemory {
 public:
  enum Kind { kOurs, kPinned };
  explicit HostMemory(Kind kind) : kind_(kind) {
    must(kind == kOurs ? allocate_pinned(&data_, kBytes)
                       : cudaHostAlloc(&data_, kBytes, cudaHostAllocPortable));
  }
  ~HostMemory() { kind_ == kOurs ? free_pinned(data_, kBytes) : cudaFreeHost(data_); }
  void* data() const { return data_; }
  int64_t count(int byte) const {
    const auto* bytes = static_cast<const unsigned char*>(data_);
    return std::count(bytes, bytes + kBytes, static_cast<unsigned char>(byte));
  }

 private:
  const Kind kind_;
  void* data_ = nullptr;
};

class CudaOrder : public testing::Test {
 protected:
  void SetUp() override { PKV_NEEDS_GPU(); }
  std::chrono::milliseconds delay_{60};
};

TEST_F(CudaOrder, OffloadComesAfterEarlierWorkOfItsStream) {
  const OwnStream stream;
  const test::DeviceMemory source(kBytes);
  Offload offload;
  for (int round = 0; round < 6; ++round) {
    const HostMemory target(round % 3 == 0 ? HostMemory::kPinned : HostMemory::kOurs);
    must(cudaMemset(source.data(), kOld, kBytes));
    must(cudaDeviceSynchronize());
    hold_up(stream, &delay_);
    must(cudaMemsetAsync(source.data(), kNew, kBytes, stream));
    const int64_t ticket = offload.start({{target.data(), source.data(), int64_t(kBytes)}}, stream);
    EXPECT_FALSE(offload.done(ticket)) << "it cannot be: what it copies is not written yet";
    offload.wait(ticket);
    EXPECT_TRUE(offload.done(ticket));
    EXPECT_EQ(target.count(kNew), int64_t(kBytes));
  }
}

TEST_F(CudaOrder, ControlWithoutTheEventACopyIsStale) {
  const OwnStream stream, other;
  const test::DeviceMemory source(kBytes);
  const HostMemory target(HostMemory::kPinned);
  must(cudaMemset(source.data(), kOld, kBytes));
  must(cudaDeviceSynchronize());
  hold_up(stream, &delay_);
  must(cudaMemsetAsync(source.data(), kNew, kBytes, stream));
  must(cudaMemcpyAsync(target.data(), source.data(), kBytes, cudaMemcpyDeviceToHost, other));
  must(cudaStreamSynchronize(other));
  EXPECT_EQ(target.count(kOld), int64_t(kBytes)) << "the delay is too short to show anything";
  must(cudaStreamSynchronize(stream));
}

TEST_F(CudaOrder, CopiesAreDoneInTheirOrder) {
  const OwnStream stream;
  const test::DeviceMemory source(kBytes);
  const HostMemory target(HostMemory::kOurs);
  Offload offload;
  std::vector<int64_t> tickets;
  hold_up(stream, &delay_);
  for (int i = 0; i < 20; ++i) {
    tickets.push_back(offload.start({{target.data(), source.data(), int64_t(kBytes)}}, stream));
  }
  EXPECT_TRUE(std::is_sorted(tickets.begin(), tickets.end()));
  EXPECT_FALSE(offload.done(tickets.front()));
  offload.wait(tickets[10]);
  for (int i = 0; i <= 10; ++i) EXPECT_TRUE(offload.done(tickets[size_t(i)]));
  offload.wait_all();
  EXPECT_TRUE(offload.done(tickets.back()));
}

ArenaTraits traits() {
  ArenaTraits traits;
  traits.alignment = 256;
  traits.slab_bytes = int64_t(kBytes);  // a slab holds one block
  traits.largest_slab = int64_t(kBytes);
  traits.deferred = true;
  return traits;
}

/** Reads `data` into `target` on a stream that is late. */
void read_late(void* data, const HostMemory& target, cudaStream_t stream,
               std::chrono::milliseconds* delay) {
  must(cudaMemset(data, kOld, kBytes));
  must(cudaDeviceSynchronize());
  hold_up(stream, delay);
  must(cudaMemcpyAsync(target.data(), data, kBytes, cudaMemcpyDeviceToHost, stream));
}

TEST_F(CudaOrder, AFreedBlockWaitsForItsLastReader) {
  const OwnStream reader, writer;
  const HostMemory target(HostMemory::kPinned);
  Arena arena(device_resource(0), 0, traits());
  {
    Order order({&arena});
    for (int round = 0; round < 3; ++round) {
      order.enter(reader);
      Block block = arena.allocate(int64_t(kBytes));
      void* address = block.data();
      read_late(address, target, reader, &delay_);
      block = Block();
      order.leave(reader);

      // No order between the streams but the one of calls; and memory is not handed on.
      order.recycle(false);
      const Block next = arena.allocate(int64_t(kBytes));
      EXPECT_NE(next.data(), address);
      must(cudaMemsetAsync(next.data(), kNew, kBytes, writer));
      must(cudaDeviceSynchronize());
      EXPECT_EQ(target.count(kOld), int64_t(kBytes));

      order.recycle(false);  // now it has passed: zeroed, and to be had again
      must(cudaDeviceSynchronize());
      const Block again = arena.allocate(int64_t(kBytes));
      HostMemory seen(HostMemory::kPinned);
      must(cudaMemcpy(seen.data(), again.data(), kBytes, cudaMemcpyDeviceToHost));
      if (again.data() == address) EXPECT_EQ(seen.count(0), int64_t(kBytes));
    }
    order.leave(reader);
    order.recycle(true);
  }
  EXPECT_EQ(arena.use().live, 0);
}

TEST_F(CudaOrder, ControlABlockThatIsHandedOnAtOnceIsOverwritten) {
  const OwnStream reader, writer;
  const HostMemory target(HostMemory::kPinned);
  const test::DeviceMemory block(kBytes);
  read_late(block.data(), target, reader, &delay_);
  must(cudaMemsetAsync(block.data(), kNew, kBytes, writer));
  must(cudaDeviceSynchronize());
  EXPECT_EQ(target.count(kNew), int64_t(kBytes)) << "the delay is too short to show anything";
}

TEST_F(CudaOrder, ACallComesAfterTheOneBefore) {
  const OwnStream first, second;
  const test::DeviceMemory memory(kBytes);
  const HostMemory target(HostMemory::kPinned);
  Arena arena(device_resource(0), 0, traits());
  Order order({&arena});
  must(cudaMemset(memory.data(), kOld, kBytes));
  must(cudaDeviceSynchronize());
  order.enter(first);
  hold_up(first, &delay_);
  must(cudaMemsetAsync(memory.data(), kNew, kBytes, first));
  order.leave(first);
  order.enter(second);
  must(cudaMemcpyAsync(target.data(), memory.data(), kBytes, cudaMemcpyDeviceToHost, second));
  order.leave(second);
  must(cudaStreamSynchronize(second));
  EXPECT_EQ(target.count(kNew), int64_t(kBytes));
}

TEST_F(CudaOrder, ControlAStreamThatDoesNotEnterIsEarly) {
  const OwnStream first, second;
  const test::DeviceMemory memory(kBytes);
  const HostMemory target(HostMemory::kPinned);
  must(cudaMemset(memory.data(), kOld, kBytes));
  must(cudaDeviceSynchronize());
  hold_up(first, &delay_);
  must(cudaMemsetAsync(memory.data(), kNew, kBytes, first));
  must(cudaMemcpyAsync(target.data(), memory.data(), kBytes, cudaMemcpyDeviceToHost, second));
  must(cudaStreamSynchronize(second));
  EXPECT_EQ(target.count(kOld), int64_t(kBytes)) << "the delay is too short to show anything";
  must(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace pariskv::cuda
