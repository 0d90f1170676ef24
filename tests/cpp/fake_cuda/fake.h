/** What the fake CUDA and its tests share. */
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "pariskv/config.h"
#include "runtime.h"

namespace pariskv::test {

/** Where the caches of all tests are. For a caller another device is the current one. */
inline constexpr int kDevice = 1, kDevices = 2;

/** A stream that is being captured: a decode on it is like a replay. */
inline const cudaStream_t kCapturedStream = reinterpret_cast<cudaStream_t>(7);
/** The one that is, for a replay in the order of another stream. */
cudaStream_t& captured_stream();

/** What was found wrong first; empty: nothing. */
std::string& wrong();
void complain(const std::string& what);

/** A small model on the fake device, in segments of 64 tokens. */
inline Config small_config(int64_t layers, int64_t query_heads, int64_t kv_heads, int64_t dim) {
  Config config;
  config.layers = layers;
  config.query_heads = query_heads;
  config.kv_heads = kv_heads;
  config.head_dim = dim;
  config.dtype = DType::kFloat16;
  config.local = 16;
  config.dense_below = 0;
  config.placement = Placement::kHost;
  config.segment_tokens = 64;
  config.device = {DeviceType::kCuda, kDevice};
  auto& policy = std::get<ParisKV>(config.policy);
  policy.block = 0;  // zones of blocks open with 1,024 tokens
  policy.tail = TailRule::kSample;
  policy.tail_rows = 16;
  return config;
}

/** Pieces of pinned memory that this thread has asked for. */
int64_t& pinned_by_me();

/** Tokens that the device counted by itself, in one layer each, and words that were sent to it. */
struct Told {
  int64_t tokens = 0, words = 0;
};
Told& told();

/** Whether this is in memory of the host. */
bool is_pinned(const void* data);

/** Pieces of memory that were ever mapped. */
int64_t pieces_mapped();

/** The device that is current for this thread. */
int current_device();

/**
 * Work on streams that the library makes is done when somebody may count on it and no earlier, or
 * by chance. On callers' streams it is done at once, or as late where a test asks for that: it has
 * to keep what it gave until then.
 */
void enqueue(cudaStream_t stream, std::function<void()> work);
bool& callers_work_late();

/** Does all that a stream was given, or every stream. */
void finish(cudaStream_t stream);
void finish_all();

/** For launches, which belong to the current device. */
void launch(cudaStream_t stream, std::function<void()> work);

/** Pieces of work on the library's streams that are still to be done. */
int64_t work_under_way();

/** A caller's stream. Once destroyed its handle is the next one's. */
cudaStream_t make_stream();

/** How often work on a stream was held back for other work. */
int64_t times_held_back();

/** Faults that the fake has on request, for tests that have to notice them. */
struct FaultSwitches {
  bool events_pass_early = false;  // before the work that they stand for
  bool nothing_by_chance = false;  // work is done, and events pass, only when waited for
};
FaultSwitches& fault_switches();

/** What may fail again and again on a device that works, and the rest. */
enum class Call { kMemory, kLaunch, kOther };

/**
 * As long as it lives: of all calls of this thread that may fail, the Nth does; or all calls of one
 * kind from their Nth on.
 */
class Faults {
 public:
  explicit Faults(int64_t nth);
  Faults(int64_t nth, Call kind);
  ~Faults();
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  /** Whether any was refused. */
  bool met() const;
};

/** Asked by every call that may fail. */
bool refused(Call kind = Call::kOther);

}  // namespace pariskv::test
