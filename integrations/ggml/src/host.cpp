#include "host.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <iterator>
#include <vector>

namespace pariskv::ggml {

namespace {

/** Versions that the tests ran with. Tensors and tables of functions lie otherwise in others. */
constexpr const char* kTried[] = {PARISKV_GGML_TRIED};

Host found;

/** ggml's libraries in this process: a host may have loaded them for itself alone. */
std::vector<std::string> libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const char* name = std::strrchr(info->dlpi_name, '/');
        name = name == nullptr ? info->dlpi_name : name + 1;
        if (std::strncmp(name, "libggml", 7) == 0 || std::strncmp(name, "libllama", 8) == 0) {
          static_cast<std::vector<std::string>*>(out)->push_back(info->dlpi_name);
        }
        return 0;
      },
      &paths);
  return paths;
}

void* find(const char* name, const std::vector<void*>& handles) {
  if (void* address = dlsym(RTLD_DEFAULT, name)) return address;
  for (void* handle : handles) {
    if (void* address = dlsym(handle, name)) return address;
  }
  return nullptr;
}

}  // namespace

const Host& host() { return found; }

std::string load_host() {
  std::vector<void*> handles;
  for (const std::string& path : libraries()) {
    // Stays open: its functions are called as long as the process lives.
    if (void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) handles.push_back(handle);
  }
  std::string missing;
#define PARISKV_GGML_FIND(name)                                   \
  if (void* address = find(#name, handles)) {                     \
    found.name = reinterpret_cast<decltype(found.name)>(address); \
  } else if (missing.empty()) {                                   \
    missing = #name;                                              \
  }
  PARISKV_GGML_FUNCTIONS(PARISKV_GGML_FIND)
#undef PARISKV_GGML_FIND
  if (!missing.empty()) return "this ggml has no " + missing;
  // Versions count operations differently.
  if (std::strcmp(found.ggml_op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT") != 0 ||
      std::strcmp(found.ggml_op_name(GGML_OP_SET_ROWS), "SET_ROWS") != 0) {
    return std::string("ggml ") + found.ggml_version() + " has other numbers for its operations";
  }
  std::string tried;
  for (const char* version : kTried) {
    if (std::strcmp(version, found.ggml_version()) == 0) return {};
    tried += (tried.empty() ? "" : ", ") + std::string(version);
  }
  return "expected a version of ggml that was tried (" + tried + "), got " + found.ggml_version();
}

void say(ggml_log_level level, const std::string& text) {
  if (found.ggml_log_internal == nullptr) return;
  found.ggml_log_internal(level, "pariskv: %s\n", text.c_str());
}

}  // namespace pariskv::ggml
