// How pages come over the bus: a copy for each, one copy of what the host has put together, or
// reads by a kernel. 8 kv heads, 24 pages of 32 rows each, K and V of 128 numbers of 16 bits: 3.1
// MB, other pages of 131,072 tokens every time. Prints a line of JSON for each way.
//
// Head-major: a page is one run of 16 KiB. Token-major: the heads of a token lie side by side, so a
// page is 32 runs of 512 bytes. Times are the host's, until the device has the pages.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "cuda_programs.h"
#include "runtime.h"

namespace pariskv::cuda {
namespace {

constexpr int64_t kHeads = 8, kTokens = 131072, kPage = 32, kRowBytes = 512;
constexpr int64_t kPageBytes = kPage * kRowBytes, kPages = 24;  // found per head
constexpr int64_t kAll = kHeads * kPages * kPageBytes;
constexpr int kWarmUp = 3, kThreads = 256;

/** Where rows of a page lie. */
struct Layout {
  const char* name;
  int64_t page_stride, head_stride, row_stride;  // bytes

  int64_t offset(int64_t head, int64_t page) const {
    return head * head_stride + page * page_stride;
  }
};
constexpr Layout kHeadMajor{"head-major", kPageBytes, kTokens * kRowBytes, kRowBytes};
constexpr Layout kTokenMajor{"token-major", kPage * kHeads * kRowBytes, kRowBytes,
                             kHeads * kRowBytes};

__global__ void __launch_bounds__(kThreads)
    read_pages(const char* rows, char* to, const int64_t* offsets, int64_t row_stride) {
  constexpr int kVectors = int(kRowBytes) / 16, kOwn = int(kPageBytes) / 16 / kThreads;
  const char* page = rows + offsets[blockIdx.x];
  uint4 own[kOwn];
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
    const int i = u * kThreads + int(threadIdx.x);
    own[u] = reinterpret_cast<const uint4*>(page + i / kVectors * row_stride)[i % kVectors];
  }
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
    const int i = u * kThreads + int(threadIdx.x);
    reinterpret_cast<uint4*>(to + blockIdx.x * kPageBytes)[i] = own[u];
  }
}

class Bus {
 public:
  explicit Bus(int rounds)
      : rounds_(rounds), to_(device_memory<char>(kAll)), offsets_(device_memory<int64_t>(kCount)) {
    check(cudaMallocHost(&rows_, size_t(kHeads * kTokens * kRowBytes)), "pinned memory");
    check(cudaMallocHost(&together_, size_t(kAll)), "pinned memory");
    check(cudaMallocHost(&found_, size_t(kCount) * sizeof(int64_t)), "pinned memory");
    std::memset(rows_, 1, size_t(kHeads * kTokens * kRowBytes));
  }

  void run() {
    for (const Layout& layout : {kHeadMajor, kTokenMajor}) {
      time("a copy for each page", layout, [&] {
        for (int64_t i = 0; i < kCount; ++i) {
          check(cudaMemcpy2DAsync(to_ + i * kPageBytes, kRowBytes, rows_ + found_[i],
                                  size_t(layout.row_stride), kRowBytes, kPage,
                                  cudaMemcpyHostToDevice, stream_),
                "copy");
        }
      });
      time("put together by the host, one copy", layout, [&] {
        for (int64_t i = 0; i < kCount; ++i) gather(layout, i);
        copy_all();
      });
      time("reads by a kernel", layout, [&] {
        check(cudaMemcpyAsync(offsets_, found_, size_t(kCount) * sizeof(int64_t),
                              cudaMemcpyHostToDevice, stream_),
              "copy");
        read_pages<<<unsigned(kCount), kThreads, 0, stream_>>>(rows_, to_, offsets_,
                                                               layout.row_stride);
        check_launch("read_pages");
      });
    }
    time("one copy of what lies together", kHeadMajor, [&] { copy_all(); });
  }

 private:
  static constexpr int64_t kCount = kHeads * kPages;

  void gather(const Layout& layout, int64_t i) {
    char* to = together_ + i * kPageBytes;
    for (int64_t row = 0; row < kPage; ++row, to += kRowBytes) {
      std::memcpy(to, rows_ + found_[i] + row * layout.row_stride, kRowBytes);
    }
  }
  void copy_all() {
    check(cudaMemcpyAsync(to_, together_, size_t(kAll), cudaMemcpyHostToDevice, stream_), "copy");
  }

  void find(const Layout& layout) {
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t page = int64_t(random_() % uint64_t(kTokens / kPage));
      found_[i] = layout.offset(i / kPages, page);
    }
  }

  void time(const char* way, const Layout& layout, const std::function<void()>& bring) {
    std::vector<double> taken;
    for (int turn = 0; turn < kWarmUp + rounds_; ++turn) {
      find(layout);
      check(cudaStreamSynchronize(stream_), "wait");
      const auto begin = std::chrono::steady_clock::now();
      bring();
      check(cudaStreamSynchronize(stream_), "wait");
      const std::chrono::duration<double, std::micro> passed =
          std::chrono::steady_clock::now() - begin;
      if (turn >= kWarmUp) taken.push_back(passed.count());
    }
    std::sort(taken.begin(), taken.end());
    std::printf("{\"way\": \"%s\", \"layout\": \"%s\", \"microseconds\": %.1f, \"bytes\": %lld}\n",
                way, layout.name, taken[taken.size() / 2], static_cast<long long>(kAll));
    std::fflush(stdout);
  }

  const int rounds_;
  OwnStream stream_;
  std::mt19937_64 random_{7};
  char *rows_ = nullptr, *together_ = nullptr;
  char* to_;
  int64_t* offsets_;
  int64_t* found_ = nullptr;
};

void run(int rounds) { Bus(rounds).run(); }

}  // namespace
}  // namespace pariskv::cuda

int main(int count, char** arguments) {
  return pariskv::cuda::run_program(count, arguments, pariskv::cuda::run);
}
