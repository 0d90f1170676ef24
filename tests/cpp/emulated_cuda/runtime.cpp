// The CUDA runtime above the emulator: devices to choose from, guarded memory, kernels in a queue
// that runs when somebody waits for it.
#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "devices.h"
#include "kept/decode/params.h"
#include "kept/keep/params.h"
#include "machine.h"
#include "pariskv/decode/params.h"
#include "prkv/decode/params.h"
#include "prkv/params.h"

namespace emulator {

#if PKV_EMULATED_ARCH >= 900
const std::vector<FakeDevice> devices = {
    {132, {0, 66, 32, 16, 7}, 9, 227 << 10}, {7, {0, 3, 1, 0, 0}, 9, 227 << 10},
    {20, {0, 10, 5, 2, 1}, 9, 227 << 10},    {1000, {0, 500, 250, 125, 60}, 9, 227 << 10},
    {33, {0, 16, 8, 4, 0}, 9, 227 << 10},    {3, {0, 0, 0, 0, 0}, 9, 227 << 10},
    {50, {0, 25, 12, 2, 2}, 12, 99 << 10}};
#else
const std::vector<FakeDevice> devices = {
    {108, {}, 8, 163 << 10}, {7, {}, 8, 163 << 10}, {20, {}, 8, 99 << 10}, {1000, {}, 8, 163 << 10},
    {33, {}, 8, 163 << 10},  {3, {}, 8, 163 << 10}, {50, {}, 8, 99 << 10}};
#endif

namespace {

int chosen_device = 0;

/** How many more times an event says that it has not passed. */
struct FakeEvent {
  int left;
};
FakeEvent* of(cudaEvent_t event) { return reinterpret_cast<FakeEvent*>(event); }

/** So much that most of it must never be touched: it is more than the machine may have. */
constexpr size_t kHuge = size_t{1} << 30;

struct Mapping {
  void* base;
  size_t bytes;
};
std::map<void*, Mapping> mappings;
std::mutex mappings_mutex;

/** Memory that ends at a page that may not be touched. */
void* take_guarded(size_t bytes) {
  const size_t aligned = (bytes + 255) / 256 * 256;
  const size_t room = (aligned + kPage - 1) / kPage * kPage;
  void* base = mmap(nullptr, room + 2 * kPage, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(base) + kPage;
  mprotect(base, kPage, PROT_NONE);
  mprotect(first + room, kPage, PROT_NONE);
  char* const data = first + room - aligned;
  if (aligned < kHuge) std::memset(data, 0xcd, aligned);  // nobody may count on zeros
  const std::lock_guard<std::mutex> lock(mappings_mutex);
  mappings[data] = {base, room + 2 * kPage};
  return data;
}
/** Zeros, without touching what nobody has touched. */
void forget(void* data, size_t bytes) {
  const auto first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto last = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  const size_t before = first - reinterpret_cast<uintptr_t>(data);
  std::memset(data, 0, before);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, bytes - before - (last - first));
}
void give_guarded_back(void* data) {
  const std::lock_guard<std::mutex> lock(mappings_mutex);
  const auto found = mappings.find(data);
  if (found == mappings.end()) fail("%p is given back, which nobody took", data);
  munmap(found->second.base, found->second.bytes);
  mappings.erase(found);
}

std::string full_name(const void* kernel) {
  Dl_info info{};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "a kernel";
  int status = 0;
  char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = readable != nullptr ? readable : info.dli_sname;
  std::free(readable);
  return name;
}
std::string kernel_name(const void* kernel) {
  std::string name = full_name(kernel);
  name = name.substr(0, name.find('('));
  const std::string room = "pariskv::cuda::";
  const size_t at = name.find(room);
  return at == std::string::npos ? name : name.substr(at + room.size());
}

int cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      return int(attribute.val.clusterDim.x);
    }
  }
  return 1;
}
bool is_early(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      return attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return false;
}

/** How many bytes the parameters of a kernel of a decode are, by the name of their type. */
size_t parameter_bytes(const std::string& kernel) {
  using namespace pariskv::cuda;
  const std::pair<const char*, size_t> known[] = {
      {"PageScoreParams", sizeof(PageScoreParams)}, {"PageAttendParams", sizeof(PageAttendParams)},
      {"PageMergeParams", sizeof(PageMergeParams)}, {"WindowParams", sizeof(WindowParams)},
      {"ScoreParams", sizeof(ScoreParams)},         {"VotesParams", sizeof(VotesParams)},
      {"RerankParams", sizeof(RerankParams)},       {"ResidentParams", sizeof(ResidentParams)},
      {"DenseParams", sizeof(DenseParams)},         {"PagedStepParams", sizeof(PagedStepParams)},
      {"AttendParams", sizeof(AttendParams)},       {"KeptStepParams", sizeof(KeptStepParams)},
      {"DigestParams", sizeof(DigestParams)},       {"PRKVChoiceParams", sizeof(PRKVChoiceParams)},
      {"ChoiceParams", sizeof(ChoiceParams)}};
  for (const auto& [name, bytes] : known) {
    if (kernel.find(name) != std::string::npos) return bytes;
  }
  fail("%s has parameters of an unknown size", kernel.c_str());
}

/** Ends the program with a sentence about who touched what it may not. */
void report_fault(int, siginfo_t* info, void*) {
  std::string where;
  if (current != nullptr) {
    for (const Block& block : current->block->cluster->blocks) {
      const char* address = static_cast<const char*>(info->si_addr);
      if (address < block.window - kPage) continue;
      if (address >= block.window + block.window_bytes + kPage) continue;
      where = ", shared memory of block " + std::to_string(block.index.x) +
              (block.alive > 0 ? "" : ", which has ended");
    }
  }
  fail("a fault at %p%s", info->si_addr, where.c_str());
}

/** Managed memory: what else it is, is known by its address alone. */
std::mutex managed_lock;
std::set<const void*>& managed() {
  static std::set<const void*> addresses;
  return addresses;
}

// Mapped memory: what is reserved cannot be touched before it is mapped. Memory of the host is not
// to be had this way.

char* pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* data = mmap(nullptr, bytes, PROT_NONE, kKind, -1, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  return *address = reinterpret_cast<CUdeviceptr>(data), CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, size_t bytes) {
  return munmap(pointer(address), bytes), CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp* wanted,
                unsigned long long) {
  const bool here = wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  return here ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult release(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
CUresult map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle,
             unsigned long long) {
  mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE);
  std::memset(pointer(address), 0xcd, bytes);  // nobody may count on zeros
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, size_t bytes) {
  emulator::flush();
  madvise(pointer(address), bytes, MADV_DONTNEED);
  return mprotect(pointer(address), bytes, PROT_NONE), CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

[[maybe_unused]] const bool watches_faults = [] {
  static char stack[64 << 10];  // a fiber's may be the one that is too small
  const stack_t own{stack, 0, sizeof stack};
  sigaltstack(&own, nullptr);
  struct sigaction action{};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  return true;
}();

}  // namespace

}  // namespace emulator

using emulator::devices;

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(emulator::reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(emulator::unreserve)},
      {"cuMemCreate", reinterpret_cast<void*>(emulator::create)},
      {"cuMemRelease", reinterpret_cast<void*>(emulator::release)},
      {"cuMemMap", reinterpret_cast<void*>(emulator::map)},
      {"cuMemUnmap", reinterpret_cast<void*>(emulator::unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(emulator::set_access)}};
  *found = known.at(name);
  return *result = cudaDriverEntryPointSuccess, cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = emulator::take_guarded(bytes);
  return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) { return cudaMalloc(data, bytes); }
cudaError_t cudaMallocManaged(void** data, size_t bytes, unsigned) {
  const cudaError_t error = cudaMalloc(data, bytes);
  const std::lock_guard<std::mutex> lock(emulator::managed_lock);
  if (error == cudaSuccess) emulator::managed().insert(*data);
  return error;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard<std::mutex> lock(emulator::managed_lock);
  const bool is = emulator::managed().count(data) > 0;
  return attributes->type = is ? cudaMemoryTypeManaged : cudaMemoryTypeHost, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaFree(void* data) {
  emulator::flush();
  const std::lock_guard<std::mutex> lock(emulator::managed_lock);
  emulator::managed().erase(data);
  if (data != nullptr) emulator::give_guarded_back(data);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  emulator::flush();
  return std::memmove(target, source, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  emulator::flush();
  if (bytes >= emulator::kHuge && value == 0) return emulator::forget(target, bytes), cudaSuccess;
  return std::memset(target, value, bytes), cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static intptr_t next = 1000;
  return *stream = reinterpret_cast<cudaStream_t>(next++), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return emulator::flush(), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return emulator::flush(), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  if (!emulator::is_recording()) emulator::flush();
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = reinterpret_cast<uintptr_t>(stream), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  return *free = *all = size_t{1} << 34, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captured = emulator::is_recording() && stream == emulator::kRecordedStream;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new emulator::FakeEvent{0}), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete emulator::of(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  if (!emulator::is_recording()) emulator::flush();
  return emulator::of(event)->left = int(emulator::random_number() % 3), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return emulator::of(event)->left = 0, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  int& left = emulator::of(event)->left;
  if (left == 0) return cudaSuccess;
  return --left, cudaErrorNotReady;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  const emulator::FakeDevice& device = devices[size_t(index)];
  *value = attribute == cudaDevAttrMultiProcessorCount            ? device.processors
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? device.shared_bytes
           : attribute == cudaDevAttrComputeCapabilityMajor       ? device.major
           : attribute == cudaDevAttrComputeCapabilityMinor       ? 0
           : attribute == cudaDevAttrConcurrentManagedAccess      ? 1
                                                                  : -1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) { return *index = emulator::chosen_device, cudaSuccess; }
cudaError_t cudaSetDevice(int index) { return emulator::chosen_device = index, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = int(devices.size()), cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
const char* cudaGetErrorString(cudaError_t) { return "of the emulator"; }

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return attributes->ptxVersion = PKV_EMULATED_ARCH / 10, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  const auto& known = devices[size_t(emulator::chosen_device)].clusters;
  return *clusters = known[31 - __builtin_clz(unsigned(emulator::cluster_of(*config)))],
         cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  auto grid = std::make_unique<emulator::Grid>();
  grid->name = emulator::kernel_name(kernel);
  grid->blocks = config->gridDim;
  grid->threads = config->blockDim;
  grid->shared_bytes = config->dynamicSmemBytes;
  grid->cluster = emulator::cluster_of(*config);
  grid->is_early = emulator::is_early(*config);
  if (grid->blocks.x % unsigned(grid->cluster) != 0) emulator::fail("a grid of broken clusters");
  if (grid->shared_bytes > size_t(devices[size_t(emulator::chosen_device)].shared_bytes)) {
    emulator::fail("%s asks for %zu bytes of shared memory", grid->name.c_str(),
                   grid->shared_bytes);
  }
  auto* body = reinterpret_cast<void (*)(const void*)>(const_cast<void*>(kernel));
  const auto* parameters = static_cast<const char*>(arguments[0]);
  const size_t bytes = emulator::parameter_bytes(emulator::full_name(kernel));
  grid->body = [body, copy = std::vector<char>(parameters, parameters + bytes)] {
    body(copy.data());
  };
  emulator::enqueue(std::move(grid));
  return cudaSuccess;
}

}  // extern "C"
