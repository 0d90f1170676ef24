#include "memory/touch.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace pariskv {

namespace {

constexpr int64_t kPage = 4096;
/** A thread takes some 50 microseconds to start, in which one clears as much as this. */
constexpr int64_t kLeast = int64_t{1} << 20;
/** More threads than these wait for memory rather than clear it. */
constexpr int64_t kMostThreads = 8;

}  // namespace

void touch_pages_here(void* data, int64_t bytes) {
  auto* touched = static_cast<volatile char*>(data);
  for (int64_t at = 0; at < bytes; at += kPage) touched[at] = 0;
}

void touch_pages(void* data, int64_t bytes) {
  const int64_t cores = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  const int64_t threads = std::clamp<int64_t>(bytes / kLeast, 1, std::min(cores, kMostThreads));
  const int64_t pages = (bytes + kPage - 1) / kPage, each = (pages + threads - 1) / threads * kPage;
  const auto part = [=](int64_t i) {
    const int64_t begin = std::min(i * each, bytes);
    touch_pages_here(static_cast<char*>(data) + begin, std::min(each, bytes - begin));
  };
  std::vector<std::thread> others;
  int64_t started = 1;
  try {
    others.reserve(size_t(threads));
    for (; started < threads; ++started) others.emplace_back(part, started);
  } catch (const std::exception&) {
    // The system has no more threads: the rest is this one's.
  }
  part(0);
  for (int64_t i = started; i < threads; ++i) part(i);
  for (std::thread& other : others) other.join();
}

}  // namespace pariskv
