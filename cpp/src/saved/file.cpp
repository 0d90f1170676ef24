#include "saved/file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <system_error>
#include <vector>

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

/** Throws unless there is a plain file at the path. */
struct stat checked(const char* verb, const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) refuse(verb, "cannot look at " + path, errno);
  if (S_ISDIR(found.st_mode)) refuse(verb, "expected a file, got a folder, " + path, EISDIR);
  if (!S_ISREG(found.st_mode)) {
    refuse(verb, "expected a file, got a device or a pipe, " + path, EINVAL);
  }
  return found;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

/** Of the file that is at the path; nothing if there is none. */
std::optional<struct stat> file_to_replace(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0 && errno == ENOENT) {
    if (path.back() == '/') refuse("save", "expected a file, got a folder, " + path, EISDIR);
    return std::nullopt;
  }
  return checked("save", path);
}

/** What a symbolic link says, or nothing if the path is no link. */
std::string link_text(const std::string& path) {
  std::vector<char> text(PATH_MAX);
  const ssize_t bytes = ::readlink(path.c_str(), text.data(), text.size());
  return bytes < 0 ? std::string() : std::string(text.data(), size_t(bytes));
}

/** The file that a path stands for, there or not: a link is followed, not replaced. */
std::string target_of(const std::string& given) {
  constexpr int kMostLinks = 40;  // as Linux follows
  check_text("save", given);
  file_to_replace(given);  // a device behind a link is refused under its own name
  std::string path = given;
  for (int links = 0;; ++links) {
    const std::string next = link_text(path);
    if (next.empty()) break;
    if (links == kMostLinks) refuse("save", "cannot follow the link " + given, ELOOP);
    path = next.front() == '/' ? next : folder_of(path) + next;
  }
  return path;
}

constexpr const char* kAcl = "system.posix_acl_access";

/** Gives the file the access list of the one at `path`, or none. False where that fails. */
bool keep_acl(int file, const std::string& path) {
  const ssize_t bytes = ::getxattr(path.c_str(), kAcl, nullptr, 0);
  if (bytes <= 0) return ::fremovexattr(file, kAcl) == 0 || errno == ENODATA || errno == ENOTSUP;
  std::vector<char> list(size_t(bytes), '\0');
  return ::getxattr(path.c_str(), kAcl, list.data(), list.size()) == bytes &&
         ::fsetxattr(file, kAcl, list.data(), list.size(), 0) == 0;
}

/**
 * Gives the file, made with mode 0600, the owner, the group, the access list and the mode of the
 * one that it replaces. What the system refuses leaves it less readable than that one, never more.
 */
void keep_access(int file, const std::string& path, const struct stat& replaced) {
  struct stat made{};
  if (::fstat(file, &made) != 0) return;
  mode_t mode = replaced.st_mode & 0777;
  bool same = true;
  if (made.st_uid != replaced.st_uid && ::fchown(file, replaced.st_uid, replaced.st_gid) == 0) {
    made.st_gid = replaced.st_gid;
  }
  if (made.st_gid != replaced.st_gid) same = ::fchown(file, gid_t(-1), replaced.st_gid) == 0;
  same = keep_acl(file, path) && same;
  if (!same) {
    // The old group's members are others now, and the new group's were others before.
    const mode_t both = (mode >> 3) & mode & 07;
    mode = (mode & 0700) | both << 3 | both;
  }
  ::fchmod(file, mode);
}

/** Opens a file that was not there, in this folder; `name` is its path. */
int open_aside(const std::string& folder, mode_t mode, std::string& name) {
  static std::atomic<int64_t> next{0};
  for (;;) {
    // Short, whatever the length of the name that it will have.
    name = folder + ".pariskv-" + std::to_string(this_process()) + "-" +
           std::to_string(next.fetch_add(1));
    const int number = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (number >= 0) return number;
    if (errno == EEXIST || errno == EINTR) continue;
    const int code = errno;
    name.clear();
    refuse("save", "cannot write to the folder " + (folder.empty() ? "." : folder), code);
  }
}

int open_to_read(const std::string& path) {
  check_text("load", path);
  checked("load", path);  // before it is opened: a pipe would keep us waiting
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
    : path_(target_of(path)),
      folder_(folder_of(path_)),
      file_(open_aside(folder_, file_to_replace(path_) ? 0600 : 0666, aside_)) {}

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
  if (const auto replaced = file_to_replace(path_)) keep_access(file_.number(), path_, *replaced);
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
