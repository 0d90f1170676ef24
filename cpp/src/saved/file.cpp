#include "saved/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <system_error>

#include "check.h"
#include "pariskv/error.h"
#include "process.h"

namespace pariskv {

namespace {

/** Throws the system's own words about a file. */
[[noreturn]] void refuse(const char* verb, const std::string& what, int code) {
  throw FileError(
      std::string("[") + verb + "] path: " + what + ": " + std::generic_category().message(code),
      code);
}

void check_text(const char* verb, const std::string& path) {
  if (path.empty()) fail("[", verb, "] path: expected the path of a file, got an empty one");
  if (path.find('\0') != std::string::npos) {
    fail("[", verb, "] path: expected the path of a file, got one with a zero byte in it");
  }
}

/** Throws unless there is a plain file at the path, or nothing where that is `optional`. */
struct stat checked(const char* verb, const std::string& path, bool optional) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) {
    if (optional && errno == ENOENT) return found;
    refuse(verb, "cannot look at " + path, errno);
  }
  if (S_ISDIR(found.st_mode)) refuse(verb, "expected a file, got a folder, " + path, EISDIR);
  if (!S_ISREG(found.st_mode)) {
    refuse(verb, "expected a file, got a device or a pipe, " + path, EINVAL);
  }
  return found;
}

/** The file that a path stands for: the file that a link leads to is replaced, not the link. */
std::string target_of(const std::string& path) {
  check_text("save", path);
  struct stat found{};
  if (::lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode)) {
    const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
    if (!real) refuse("save", "cannot follow the link " + path, errno);
    checked("save", real.get(), false);
    return real.get();
  }
  checked("save", path, true);
  if (path.back() == '/') refuse("save", "expected a file, got a folder, " + path, EISDIR);
  return path;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

/** Opens a file that was not there, in this folder; `name` is its path. */
int open_aside(const std::string& folder, std::string& name) {
  static std::atomic<int64_t> next{0};
  for (;;) {
    // Short, whatever the length of the name that it will have.
    name = folder + ".pariskv-" + std::to_string(this_process()) + "-" +
           std::to_string(next.fetch_add(1));
    const int number = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (number >= 0) return number;
    if (errno == EEXIST || errno == EINTR) continue;
    const int code = errno;
    name.clear();
    refuse("save", "cannot write to the folder " + (folder.empty() ? "." : folder), code);
  }
}

int open_to_read(const std::string& path) {
  check_text("load", path);
  checked("load", path, false);  // before it is opened: a pipe would keep us waiting
  const int number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (number < 0) refuse("load", "cannot read " + path, errno);
  return number;
}

/** Calls `move(done)` until it has moved so many bytes. Returns 0, or an errno. */
template <typename Move>
int move_all(int64_t bytes, Move move) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t moved = move(done);
    if (moved > 0) {
      done += moved;
    } else if (moved == 0) {
      return EIO;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

int Descriptor::close() {
  const int number = number_;
  number_ = -1;
  return number < 0 || ::close(number) == 0 || errno == EINTR ? 0 : errno;
}

NewFile::NewFile(const std::string& path)
    : path_(target_of(path)), folder_(folder_of(path_)), file_(open_aside(folder_, aside_)) {}

NewFile::~NewFile() {
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

void NewFile::write(const void* data, int64_t bytes, int64_t offset) {
  const auto* next = static_cast<const char*>(data);
  const int code = move_all(bytes, [&](int64_t done) {
    return ::pwrite(file_.number(), next + done, size_t(bytes - done), off_t(offset + done));
  });
  if (code != 0) refuse("save", "cannot write " + path_, code);
}

void NewFile::commit() {
  if (::fsync(file_.number()) != 0) refuse("save", "cannot write " + path_, errno);
  if (const int code = file_.close()) refuse("save", "cannot write " + path_, code);
  if (::rename(aside_.c_str(), path_.c_str()) != 0) {
    refuse("save", "cannot write " + path_, errno);
  }
  aside_.clear();
  // The name too, as far as the file system can: the file is in its place already.
  const Descriptor folder(
      ::open(folder_.empty() ? "." : folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number() >= 0) ::fsync(folder.number());
}

OldFile::OldFile(std::string path) : path_(std::move(path)), file_(open_to_read(path_)) {
  struct stat found{};
  if (::fstat(file_.number(), &found) != 0) refuse("load", "cannot read " + path_, errno);
  bytes_ = int64_t(found.st_size);
}

void OldFile::read(void* data, int64_t bytes, int64_t offset) const {
  auto* next = static_cast<char*>(data);
  const int code = move_all(bytes, [&](int64_t done) {
    return ::pread(file_.number(), next + done, size_t(bytes - done), off_t(offset + done));
  });
  if (code != 0) refuse("load", "cannot read " + path_, code);
}

}  // namespace pariskv
