/** Bytes that the system has left, asked before pages are taken that are used at once. */
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace pariskv {

/**
 * Bytes that the system could still give without swapping; negative when it does not say. Taking
 * more than these starves the machine, or gets a process killed at the limit of its control group.
 * @param root  ahead of the system's own paths: empty, but for tests
 */
int64_t available_host_bytes(const std::string& root = "");

/** Looks now and then whether enough of the system's memory is left beside a cache. */
class Shortage {
 public:
  explicit Shortage(std::string root = "") : root_(std::move(root)) {}

  /**
   * Bytes that are missing from a gigabyte and a thirty-second of the bytes `held`. Asks the system
   * once in half a second, and answers the same until then.
   */
  int64_t bytes(int64_t held);

 private:
  const std::string root_;
  std::chrono::steady_clock::time_point asked_{};
  int64_t lacking_ = 0;
};

/** Throws OutOfMemory if the system says that it has fewer bytes. */
void check_available(int64_t bytes);

}  // namespace pariskv
