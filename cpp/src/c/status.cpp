#include "c/status.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pariskv/cache.h"
#include "pariskv/error.h"

namespace pariskv::c {

namespace {

// A sentence has its place beforehand: noting a failure cannot fail.
constexpr size_t kLongest = 2048;
thread_local char last_error[kLongest] = "";
thread_local int32_t last_errno = 0;

pariskv_status note(pariskv_status status, const char* sentence) noexcept {
  const size_t length = std::min(std::strlen(sentence), kLongest - 1);
  std::memcpy(last_error, sentence, length);
  last_error[length] = '\0';
  return status;
}

}  // namespace

pariskv_status failed() noexcept {
  try {
    throw;
  } catch (const InternalError& error) {
    return note(PARISKV_INTERNAL_ERROR, error.what());
  } catch (const std::invalid_argument& error) {
    return note(PARISKV_INVALID_ARGUMENT, error.what());
  } catch (const OutOfMemory& error) {
    return note(PARISKV_OUT_OF_MEMORY, error.what());
  } catch (const CudaError& error) {
    return note(PARISKV_CUDA_ERROR, error.what());
  } catch (const FileError& error) {
    last_errno = error.code();
    return note(PARISKV_FILE_ERROR, error.what());
  } catch (const Stopped& error) {
    return note(PARISKV_STOPPED, error.what());
  } catch (const std::bad_alloc&) {
    return note(PARISKV_OUT_OF_MEMORY, "the process has no memory left for the call's own lists");
  } catch (const std::exception& error) {
    return note(PARISKV_INTERNAL_ERROR, error.what());
  } catch (...) {
    return note(PARISKV_INTERNAL_ERROR,
                "something that is no std::exception was thrown inside of the call; functions that "
                "the program lends must not throw");
  }
}

}  // namespace pariskv::c

const char* pariskv_version(void) { return pariskv::version(); }

const char* pariskv_last_error(void) { return pariskv::c::last_error; }

int32_t pariskv_last_errno(void) { return pariskv::c::last_errno; }

const char* pariskv_status_name(pariskv_status status) {
  switch (status) {
    case PARISKV_OK:
      return "ok";
    case PARISKV_INVALID_ARGUMENT:
      return "invalid argument";
    case PARISKV_OUT_OF_MEMORY:
      return "out of memory";
    case PARISKV_CUDA_ERROR:
      return "CUDA error";
    case PARISKV_FILE_ERROR:
      return "file error";
    case PARISKV_STOPPED:
      return "stopped";
    case PARISKV_INTERNAL_ERROR:
      return "internal error";
  }
  return "unknown status";
}

const char* pariskv_cpu_level(void) { return pariskv::cpu_level(); }

int32_t pariskv_is_built(int32_t device) {
  if (device != PARISKV_CPU && device != PARISKV_CUDA) return 0;
  return pariskv::is_built(pariskv::DeviceType(device)) ? 1 : 0;
}

int32_t pariskv_is_available(int32_t device) {
  return pariskv_is_built(device) != 0 && pariskv::is_available(pariskv::DeviceType(device)) ? 1
                                                                                             : 0;
}
