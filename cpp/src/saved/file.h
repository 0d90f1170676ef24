/** Files that appear whole or not at all, and files that are read by several threads. */
#pragma once

#include <cstdint>
#include <string>

namespace pariskv {

/** An open file of the system's; closed at the end. */
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  /** 0, or why the system could not close it. */
  int close();

 private:
  int number_;
};

/**
 * A file that is written under another name in the same folder. `commit` puts it in the place of
 * `path`, all at once; without that nothing of it stays. Links are followed, there or not. A file
 * that is replaced keeps its mode and owner; a new one follows the umask.
 */
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /** May be called by several threads at a time. */
  void write(const void* data, int64_t bytes, int64_t offset);

  /** Waits until the disk has it. */
  void commit();

 private:
  const std::string path_;    // links followed
  const std::string folder_;  // ends with a slash; empty: the current one
  std::string aside_;         // empty once it has its place
  Descriptor file_;
};

/** A file that is there. */
class OldFile {
 public:
  explicit OldFile(std::string path);

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }

  /** May be called by several threads at a time. The range lies within `bytes()`. */
  void read(void* data, int64_t bytes, int64_t offset) const;

 private:
  const std::string path_;
  Descriptor file_;
  int64_t bytes_ = 0;
};

}  // namespace pariskv
