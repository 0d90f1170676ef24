/** Bytes that the system has left, asked before pages are taken that are used at once. */
#pragma once

#include <cstdint>
#include <string>

namespace pariskv {

/**
 * Bytes that the system could still give without swapping; negative when it does not say. Taking
 * more than these starves the machine, or gets a process killed at the limit of its control group.
 * @param root  ahead of the system's own paths: empty, but for tests
 */
int64_t available_host_bytes(const std::string& root = "");

/** Throws OutOfMemory if the system says that it has fewer bytes. */
void check_available(int64_t bytes);

}  // namespace pariskv
