// The shared library shows the names of the API and nothing else.
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace pariskv {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/** What a command prints. */
std::string said_by(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char part[4096];
  for (size_t n = 0; (n = fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
  EXPECT_EQ(pclose(pipe), 0) << command;
  return text;
}

/** Names that the library defines for programs that load it, as the linker knows them. */
std::vector<std::string> shown() {
  std::istringstream lines(said_by("nm -D --defined-only -P " PARISKV_SHARED_LIBRARY));
  std::vector<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    names.push_back(line.substr(0, line.find(' ')));
  }
  return names;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

/** "pariskv::Cache::add()" becomes pariskv, Cache, add; "typeinfo for" and its like go. */
std::vector<std::string> parts_of(std::string name) {
  name = std::regex_replace(name, std::regex("^(typeinfo|typeinfo name|vtable) for "), "");
  name = std::regex_replace(name, std::regex("(\\[abi:cxx11\\])?\\(.*"), "");
  std::vector<std::string> parts;
  for (size_t at = 0, next = 0; next != std::string::npos; at = next + 2) {
    next = name.find("::", at);
    parts.push_back(name.substr(at, next == std::string::npos ? next : next - at));
  }
  return parts;
}

/** Names that the public headers of C++ mark with PARISKV_API, and those of C. */
struct Marked {
  std::set<std::string> cpp, c;

  Marked() {
    const std::regex declared(
        "\\n *PARISKV_API [^;{(]*?\\b(operator==|\\w+)\\(|\\n(?:class|struct) PARISKV_API (\\w+)");
    for (const auto& entry : std::filesystem::directory_iterator(PARISKV_HEADERS)) {
      const std::string text = text_of(entry.path());
      auto found = std::sregex_iterator(text.begin(), text.end(), declared);
      for (; found != std::sregex_iterator(); ++found) {
        const std::string name = (*found)[1].matched ? (*found)[1] : (*found)[2];
        (name.rfind("pariskv_", 0) == 0 ? c : cpp).insert(name);
      }
    }
  }
};

TEST(SharedLibrary, ShowsTheApiAlone) {
  const Marked marked;
  const std::vector<std::string> names = shown();
  int64_t classes = 0;
  for (const std::string& name : names) {
    if (name.rfind("pariskv_", 0) == 0) {
      EXPECT_EQ(marked.c.count(name), 1u) << name << " is in no header";
      continue;
    }
    const std::vector<std::string> parts = parts_of(demangled(name));
    ASSERT_GE(parts.size(), 2u) << name;
    EXPECT_EQ(parts[0], "pariskv") << name;
    EXPECT_TRUE(marked.cpp.count(parts[1]) || marked.cpp.count(parts.back()))
        << demangled(name) << " has no PARISKV_API";
    // A third part is a member; a fourth would belong to a class inside, as Cache::Impl.
    EXPECT_LE(parts.size(), 3u) << demangled(name) << " is not of the API";
    classes += parts.size() == 3;
  }
  EXPECT_GT(classes, 20) << "the members of Cache are not there";
}

TEST(SharedLibrary, HasAllThatHeadersDeclare) {
  const Marked marked;
  std::set<std::string> found;
  for (const std::string& name : shown()) {
    const std::vector<std::string> parts = parts_of(demangled(name));
    found.insert(parts.back());
    found.insert(parts[parts.size() > 1 ? 1 : 0]);
  }
  for (const auto* names : {&marked.c, &marked.cpp}) {
    for (const std::string& name : *names) {
      if (name == "CudaError" && found.count(name) == 0) continue;  // a build without CUDA
      EXPECT_EQ(found.count(name), 1u) << name;
    }
  }
}

TEST(SharedLibrary, NamesOfCAreTheRecordedOnes) {
  std::set<std::string> found, recorded;
  for (const std::string& name : shown()) {
    if (name.rfind("pariskv_", 0) == 0) found.insert(name);
  }
  const std::string record = text_of(PARISKV_C_RECORD);
  const std::regex call("(pariskv_\\w+)\\(");
  for (auto i = std::sregex_iterator(record.begin(), record.end(), call);
       i != std::sregex_iterator(); ++i) {
    recorded.insert((*i)[1]);
  }
  EXPECT_EQ(found, recorded);
  EXPECT_GT(found.size(), 30u);
}

TEST(SharedLibrary, ItsNameForTheLoaderHasTheVersion) {
  const std::string dynamic = said_by("readelf -d -W " PARISKV_SHARED_LIBRARY);
  EXPECT_NE(dynamic.find("Library soname: [libpariskv.so." PARISKV_SOVERSION "]"),
            std::string::npos)
      << dynamic;
}

}  // namespace
}  // namespace pariskv
