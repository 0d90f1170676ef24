#include "driver.h"

#include "runtime.h"

namespace pariskv::cuda {

namespace {

template <typename Function>
bool find(const char* name, Function& function) {
  constexpr unsigned kVersion = 12020;  // the first with memory of the host
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (!succeeded(
          cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result)) ||
      result != cudaDriverEntryPointSuccess) {
    return false;
  }
  function = reinterpret_cast<Function>(found);
  return true;
}

Driver find_all() {
  Driver found{};
  found.complete = find("cuMemAddressReserve", found.reserve) &&
                   find("cuMemAddressFree", found.unreserve) && find("cuMemCreate", found.create) &&
                   find("cuMemRelease", found.release) && find("cuMemMap", found.map) &&
                   find("cuMemUnmap", found.unmap) && find("cuMemSetAccess", found.set_access);
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = find_all();
  return found;
}

}  // namespace pariskv::cuda
