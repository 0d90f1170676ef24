// Streams and events. What streams are given is done late, as a device might: who reads too early,
// or gives memory away too early, meets it.
#include <cstdlib>
#include <deque>
#include <map>
#include <vector>

#include "fake.h"

namespace pariskv::test {

namespace {

struct FakeStream {
  unsigned long long id = 0;
  bool own = false;  // the library's
  std::deque<std::function<void()>> work{};
  int64_t given = 0, done = 0;

  bool late() const { return own || callers_work_late(); }
};

unsigned long long next_id = 1;
int64_t held_back = 0;

std::map<cudaStream_t, FakeStream>& streams() {
  // Callers' streams: the default one, three more, and the one that is being captured.
  static std::map<cudaStream_t, FakeStream> all = [] {
    std::map<cudaStream_t, FakeStream> known;
    for (const intptr_t handle : {0, 1, 2, 3, 7}) {
      known[reinterpret_cast<cudaStream_t>(handle)].id = next_id++;
    }
    return known;
  }();
  return all;
}

/** Null, after a complaint, for a stream that is gone. */
FakeStream* find(cudaStream_t handle) {
  const auto found = streams().find(handle);
  if (found != streams().end()) return &found->second;
  return complain("a stream is used that is not there any more"), nullptr;
}

/** All of the library's streams are on its device; the default one is the current device's. */
void check_device(cudaStream_t handle) {
  if (handle == nullptr && current_device() != kDevice) {
    complain("the default stream of another device is used");
  }
}

/** Streams that are gone, with what is still to be done on them. */
std::deque<FakeStream>& gone() {
  static std::deque<FakeStream> streams;
  return streams;
}

void run_until(FakeStream& stream, int64_t position) {
  while (stream.done < position && !stream.work.empty()) {
    const std::function<void()> work = std::move(stream.work.front());
    stream.work.pop_front();
    ++stream.done;
    work();
  }
}

/** The stream with this id, whoever has its handle by now; null: gone, and done with all. */
FakeStream* with_id(unsigned long long id) {
  for (auto& [handle, stream] : streams()) {
    if (stream.id == id) return &stream;
  }
  for (FakeStream& stream : gone()) {
    if (stream.id == id) return &stream;
  }
  return nullptr;
}

void work_by_chance() {
  if (fault_switches().nothing_by_chance) return;
  const auto perhaps = [](FakeStream& stream) {
    if (!stream.work.empty() && std::rand() % 8 == 0) run_until(stream, stream.done + 1);
  };
  for (auto& [handle, stream] : streams()) perhaps(stream);
  for (FakeStream& stream : gone()) perhaps(stream);
}

struct Fault {
  int64_t left = -1;  // calls until the one that is refused; negative: none to come
  bool of_a_kind = false;
  Call kind = Call::kOther;
  int64_t met = 0;
};
thread_local Fault fault;

}  // namespace

struct FakeEvent {
  int left = 0;                   // how many more times it says that it has not passed
  unsigned long long stream = 0;  // its id
  int64_t position = 0;
  void reach() const {
    if (FakeStream* found = with_id(stream)) run_until(*found, position);
  }
  void pass() {
    left = 0;
    reach();
  }
  /** Somebody has waited for it, or for what comes after it. */
  bool reached() const {
    const FakeStream* found = with_id(stream);
    return found == nullptr || (found->late() && found->done >= position);
  }
};

std::string& wrong() {
  static std::string text;
  return text;
}
void complain(const std::string& what) {
  if (wrong().empty()) wrong() = what;
}
FaultSwitches& fault_switches() {
  static FaultSwitches fault_switches;
  return fault_switches;
}

void enqueue(cudaStream_t handle, std::function<void()> work) {
  check_device(handle);
  FakeStream* stream = find(handle);
  if (stream == nullptr) return;
  work_by_chance();
  if (!stream->late()) return work();
  stream->work.push_back(std::move(work));
  ++stream->given;
}

void finish(cudaStream_t handle) {
  FakeStream* stream = find(handle);
  if (stream != nullptr) run_until(*stream, stream->given);
}

void finish_all() {
  for (auto& [handle, stream] : streams()) run_until(stream, stream.given);
  for (FakeStream& stream : gone()) run_until(stream, stream.given);
  gone().clear();
}

bool& callers_work_late() {
  static bool late = false;
  return late;
}

cudaStream_t& captured_stream() {
  static cudaStream_t stream = kCapturedStream;
  return stream;
}

void launch(cudaStream_t stream, std::function<void()> work) {
  if (refused(Call::kLaunch)) cuda::check(cudaErrorLaunchOutOfResources, "launch");
  if (current_device() != kDevice) complain("a launch while another device is the current one");
  enqueue(stream, std::move(work));
}

int64_t work_under_way() {
  int64_t count = 0;
  for (const auto& [handle, stream] : streams()) count += int64_t(stream.work.size());
  return count;
}

int64_t times_held_back() { return held_back; }

cudaStream_t make_stream() {
  intptr_t handle = 100;
  while (streams().count(reinterpret_cast<cudaStream_t>(handle)) > 0) ++handle;
  streams()[reinterpret_cast<cudaStream_t>(handle)].id = next_id++;
  return reinterpret_cast<cudaStream_t>(handle);
}

Faults::Faults(int64_t nth) { fault = {nth}; }
Faults::Faults(int64_t nth, Call kind) { fault = {nth, true, kind}; }
Faults::~Faults() { fault = {}; }
bool Faults::met() const { return fault.met > 0; }

bool refused(Call kind) {
  if (fault.left < 0 || (fault.of_a_kind && kind != fault.kind)) return false;
  if (fault.left > 0) return --fault.left, false;
  if (!fault.of_a_kind) fault.left = -1;
  return ++fault.met, true;
}

}  // namespace pariskv::test

using namespace pariskv::test;

namespace {

FakeEvent* of(cudaEvent_t event) { return reinterpret_cast<FakeEvent*>(event); }

/** Some thread is always capturing a graph, and what may wait spoils it unless it says not to. */
bool spoils_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaStreamCaptureMode same = mode;
  cudaThreadExchangeStreamCaptureMode(&same);
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  return complain("a wait, or a question, that spoils captures of other threads"), true;
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (current_device() != kDevice) complain("a stream for another device");
  if (refused()) return cudaErrorUnknown;
  static intptr_t next = 1000;
  *stream = reinterpret_cast<cudaStream_t>(next++);
  streams()[*stream].id = next_id++;
  return streams()[*stream].own = true, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  FakeStream* stream = find(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  // What it was given is done all the same, some time.
  if (!stream->work.empty()) gone().push_back(std::move(*stream));
  return streams().erase(handle), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  check_device(handle);
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  if (refused()) return cudaErrorUnknown;
  return finish(handle), cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  const FakeStream* stream = find(handle);
  return stream == nullptr ? cudaErrorInvalidResourceHandle : (*id = stream->id, cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  check_device(handle);
  FakeStream* stream = find(handle);
  if (refused() || stream == nullptr) return cudaErrorUnknown;
  ++held_back;
  // As it was recorded last: it may be recorded anew before a late stream gets there.
  const FakeEvent recorded = *of(event);
  const auto wait = [recorded] { recorded.reach(); };
  if (!stream->late()) return wait(), cudaSuccess;
  stream->work.push_back(wait);
  return ++stream->given, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  if (find(handle) == nullptr) return cudaErrorInvalidResourceHandle;
  const bool captured = handle == captured_stream();
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (current_device() != kDevice) complain("an event for another device");
  if (refused(Call::kMemory)) return cudaErrorMemoryAllocation;
  return *event = reinterpret_cast<cudaEvent_t>(new FakeEvent), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete of(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  check_device(handle);
  const FakeStream* stream = find(handle);
  if (refused() || stream == nullptr) return cudaErrorUnknown;
  const int left = fault_switches().nothing_by_chance ? 1 << 30 : std::rand() % 3;
  return *of(event) = {left, stream->id, stream->given}, cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  if (refused()) return cudaErrorUnknown;
  return of(event)->pass(), cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (spoils_captures()) return cudaErrorStreamCaptureUnsupported;
  if (refused()) return cudaErrorUnknown;
  work_by_chance();
  if (fault_switches().events_pass_early) return cudaSuccess;
  if (of(event)->left > 0 && !of(event)->reached()) return --of(event)->left, cudaErrorNotReady;
  return of(event)->pass(), cudaSuccess;
}

}  // extern "C"
