#include "memory/available.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "pariskv/error.h"

namespace pariskv {

namespace {

/** The rest of the first line of a file that begins with `start`; false: there is none. */
bool find_line(const std::string& path, const char* start, std::string& rest) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r"),
                                                             std::fclose);
  char line[4096];
  const size_t length = std::strlen(start);
  while (file && std::fgets(line, sizeof line, file.get()) != nullptr) {
    if (std::strncmp(line, start, length) != 0) continue;
    line[std::strcspn(line, "\n")] = 0;
    return rest = line + length, true;
  }
  return false;
}

/** The number there; negative when there is none. */
int64_t find_number(const std::string& path, const char* start) {
  std::string rest;
  if (!find_line(path, start, rest)) return -1;
  char* end = nullptr;
  const int64_t number = std::strtoll(rest.c_str(), &end, 10);
  return end != rest.c_str() ? number : -1;  // "max" is no number
}

/** Bytes left of a control group's own limit; negative when it has none. */
int64_t left_of(const std::string& group) {
  const std::string file = group + "/memory.";
  const int64_t most = find_number(file + "max", ""), used = find_number(file + "current", "");
  if (most < 0 || used < 0) return -1;
  // Files that were read are given back when there is need.
  const int64_t files = std::max<int64_t>(find_number(file + "stat", "inactive_file "), 0);
  return std::max<int64_t>(most - used + files, 0);
}

/** Bytes that the control group of this process and its parents may still take; or negative. */
int64_t left_to_group(const std::string& root) {
  std::string group;
  if (!find_line(root + "/proc/self/cgroup", "0::", group)) return -1;
  int64_t least = -1;
  while (true) {
    const int64_t left = left_of(root + "/sys/fs/cgroup" + group);
    if (left >= 0 && (least < 0 || left < least)) least = left;
    const size_t last = group.rfind('/');
    if (group.empty() || last == std::string::npos) return least;
    group.resize(last);
  }
}

}  // namespace

int64_t available_host_bytes(const std::string& root) {
  int64_t available = find_number(root + "/proc/meminfo", "MemAvailable:");
  if (available >= 0) available *= 1024;  // the file says kB
  const int64_t left = left_to_group(root);
  return left >= 0 && (available < 0 || left < available) ? left : available;
}

int64_t Shortage::bytes(int64_t held) {
  constexpr int64_t kLeast = int64_t{1} << 30;
  const auto now = std::chrono::steady_clock::now();
  if (now - asked_ < std::chrono::milliseconds(500)) return lacking_;
  asked_ = now;
  const int64_t available = available_host_bytes(root_);
  lacking_ = available < 0 ? 0 : std::max<int64_t>(kLeast + held / 32 - available, 0);
  return lacking_;
}

void check_available(int64_t bytes) {
  const int64_t available = available_host_bytes();
  if (available < 0 || bytes <= available) return;
  throw OutOfMemory("[reserve] asked for " + std::to_string(bytes) +
                    " bytes ahead, but the system has only " + std::to_string(available) +
                    " left; reserve less");
}

}  // namespace pariskv
