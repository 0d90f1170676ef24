/**
 * A GPU of fibers: every thread of a kernel is one, and a scheduler runs them one at a time in an
 * order that a seed decides. What a kernel may not do ends the program with a sentence.
 */
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

constexpr size_t kPage = 4096;

struct Block;
struct Cluster;

/** What the lanes of a warp do together; all of them have to be at the same. */
enum class Meeting { kNone, kSync, kShuffle, kVote, kReduce, kMatrix };

/** What a lane brings to a meeting. */
struct Slot {
  uint32_t words[8];
};

struct Warp {
  // Two sets: a lane may be at the next meeting before another has read what this one brought.
  Slot slots[2][32];
  unsigned generation = 0;
  int arrived = 0;
  int size = 32;
  Meeting meeting = Meeting::kNone;
};

/** A copy of cp.async, or what follows copies: the end of a group, an arrival at a barrier. */
struct Staged {
  enum { kCopy, kGroup, kArrival } kind;
  char* to;
  const char* from;
  uint32_t bytes, zeros;
  uint64_t* barrier;
};

/** A bulk copy from shared memory to the device's. */
struct Stored {
  char* to;
  const char* from;
  uint32_t bytes;
  bool committed;
};

/** A bulk copy to shared memory, or some words for another block: a barrier counts its bytes. */
struct Delivery {
  char* to;
  const char* from;  // null: `words`
  uint32_t bytes;
  uint64_t* barrier;
  uint32_t words[4];
};

/** One thread. */
struct Fiber {
  void* stack_pointer;
  char* stack_top;
  unsigned thread, lane;
  uint3 index;
  Block* block;
  Warp* warp;
  bool done;
  // What it waits for, if it does: a word to change, a barrier's phase to end, the grid before.
  const unsigned* word;
  unsigned seen;
  const uint64_t* barrier;
  uint32_t parity;
  bool at_grid_wait;
  const char* where;
  // The flag in global memory that it read last, and the value.
  const uint32_t* polled;
  uint32_t polled_value;
  // Between the two halves of the cluster's barrier.
  bool cluster_arrived;
  unsigned cluster_generation;
  int groups;  // of staged copies that are not done
  std::vector<Staged> staged;
  std::vector<Stored> stores;
};

/** The kernel's launch. */
struct Grid {
  std::string name;
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  std::function<void()> body;
  int cluster = 1;
  bool is_early = false;  // may begin before the one that it follows has ended
  bool released = true;   // that one has ended
  std::vector<std::unique_ptr<Cluster>> live;
};

/** One of a block's barriers with a number; what it counts has two sums, as a warp's slots. */
struct NumberedBarrier {
  unsigned generation = 0;
  int arrived = 0;
  int sums[2] = {0, 0};
};

struct Block {
  Grid* grid;
  Cluster* cluster;
  uint3 index;
  int rank;  // within the cluster
  int threads, alive;
  bool started = false;
  std::vector<Warp> warps;
  // __syncthreads, and what it counts; two sums, as a warp's slots.
  unsigned generation = 0;
  int arrived = 0;
  int sums[2] = {0, 0};
  NumberedBarrier numbered[16];
  // Shared memory: what is declared grows from the window's start, a launch's bytes are its end.
  char* window;
  size_t window_bytes;
  char* dynamic;
  size_t static_bytes = 0;
  std::vector<std::pair<const void*, char*>> statics;
};

struct Cluster {
  Grid* grid;
  std::vector<Block> blocks;
  std::vector<Fiber*> fibers;
  std::vector<Delivery> deliveries;  // under way
  unsigned generation = 0;
  int arrived = 0, alive = 0;
  bool has_staged = false;
};

/** The thread that runs; null: none does. */
extern Fiber* current;

/**
 * 0: all is in order and copies arrive at once. Else what is free to happen happens at random, and
 * with an odd one kernels that may begin before their predecessor ends do so.
 */
extern unsigned seed;
/** What the test does, for messages, and a seed, with which it goes the same way every time. */
void begin(const std::string& task, unsigned seed);

/** True once in so many; never with seed 0. */
bool chance(unsigned one_in);
uint32_t random_number();

/** Ends the program, for what was asked has no meaning on a GPU. */
[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);
/** Who `current` is, for messages. */
std::string whereabouts();

/** Puts a kernel into the queue. Its body has to outlive that, or the launch flushes. */
void enqueue(std::unique_ptr<Grid> grid);

/** A graph: kernels in their order. What was given to side streams lies where it was asked for. */
using Recording = std::vector<std::unique_ptr<Grid>>;
/** The stream that is captured while something is recorded. */
inline const cudaStream_t kRecordedStream = reinterpret_cast<cudaStream_t>(7);
/** The kernels that `launch` puts into the queue are kept instead of run. */
Recording record(const std::function<void()>& launch);
bool is_recording();
void replay(const Recording& recording);
/** Runs all that is in the queue. */
void flush();

/** Back to the scheduler, until what `current` waits for is there. */
void yield();
void wait_for(const unsigned& word, unsigned seen, const char* where);

// meetings.cpp: threads among themselves.

const Slot* meet(Meeting meeting, const void* data, size_t bytes);
void block_barrier(const char* where);
int block_count(bool predicate);
int numbered_count(int id, int threads, bool predicate);
/** The same without waiting; false: some threads are still to come. */
bool numbered_arrive(int id, int threads, bool predicate);
/** Barriers wait for those that are left when a thread ends. */
void leave_barriers(Fiber& fiber);

// shared_memory.cpp: addresses, barriers, copies.

/** A window with a page on either side that may not be touched. */
char* take_window(size_t bytes);
void give_window_back(char* window, size_t bytes);
/** From now on a touch is a fault: its block has ended, and others have no business there. */
void close_window(const Block& block);
/** A variable of the block, made when its first thread comes by. */
char* static_shared_bytes(const void* key, size_t bytes, size_t alignment);
/** An address within the window, the block's rank plus one in the upper byte. */
uint32_t shared_address(const void* pointer);
char* from_shared(uint32_t address, size_t bytes, size_t alignment);
uint32_t map_address(uint32_t address, int rank);
bool phase_has_ended(const uint64_t* barrier, uint32_t parity);
void deliver(const Delivery& delivery);
/** The first of what a thread has staged, in order; false when there is nothing. */
bool do_staged(Fiber& fiber);

}  // namespace emulator
