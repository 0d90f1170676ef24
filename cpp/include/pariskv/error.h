/**
 * The exceptions that the library throws.
 *
 * Your mistake     std::invalid_argument  text "[verb] argument: expected ..., got ..."
 * No memory left   pariskv::OutOfMemory   names the bytes wanted and the bytes free
 * The GPU said no  pariskv::CudaError     says which call and why
 * A file refused   pariskv::FileError     says which file and why; code() is the system's errno
 * You said stop    pariskv::Stopped       Resources::should_stop answered true
 * Our bug          pariskv::InternalError please report it
 *
 * Whatever is thrown, the cache is as it was before the call; where the device is lost, nothing
 * but its end is left to it. Arrays that a call writes to may hold a part of its results. Python
 * has ValueError, OutOfMemory (a MemoryError), OSError for files, RuntimeError, and for a stopped
 * call what the signal's handler raised: KeyboardInterrupt.
 */
#pragma once

#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "pariskv/export.h"

namespace pariskv {

/** The budget or the resource behind an arena refused an allocation. */
class PARISKV_API OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/** A CUDA call failed. Most often the device is lost to the process after it; see the text. */
class PARISKV_API CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/** The system would not read or write a file: it is not there, the disk is full, and so on. */
class PARISKV_API FileError : public std::runtime_error {
 public:
  FileError(const std::string& message, int code) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

/** A call was told to stop before it was done. */
class PARISKV_API Stopped : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/** A promise that the library makes to itself was broken. */
class PARISKV_API InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace pariskv
