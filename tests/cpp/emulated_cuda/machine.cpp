// Fibers, the blocks they belong to, and who runs when.
#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

// Saves what a function has to leave as it was, and goes on where the other stack was left.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.globl emulator_switch
emulator_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

namespace emulator {

Fiber* current = nullptr;
unsigned seed = 0;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kCacheLine = 64;
constexpr size_t kStaticBytes = 64 << 10;  // of a window: room for what is declared shared

std::string task;
uint64_t random_state = 1;
void* scheduler_stack = nullptr;
std::vector<Fiber*> free_fibers;
std::vector<std::unique_ptr<Grid>> queue;
Recording* recording = nullptr;    // what is launched goes there
std::recursive_mutex queue_mutex;  // the library has a thread of its own that takes memory

/** A warp, as the scheduler sees it. */
struct Task {
  Cluster* cluster;
  size_t first, lanes;
};
using Clusters = std::vector<Cluster*>;

void end_thread() {
  Fiber& fiber = *current;
  Block& block = *fiber.block;
  if (!fiber.stores.empty()) fail("ends while copies from its shared memory are under way");
  while (do_staged(fiber)) {
  }
  fiber.done = true;
  leave_barriers(fiber);
  // A block of its own needs no such care: nobody else knows its addresses.
  if (block.alive == 0 && block.cluster->blocks.size() > 1) close_window(block);
}

void entry() {
  current->block->started = true;
  current->block->grid->body();
  end_thread();
  yield();
  std::abort();  // it is never resumed
}

Fiber* take_fiber() {
  if (free_fibers.empty()) {
    static size_t made = 0;
    auto* fiber = new Fiber{};
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("there is no memory for the stack of a thread");
    // Tops at one distance from the end of a page would share a few lines of the cache.
    const size_t colour = 5 * made++ * kCacheLine % kPage;
    fiber->stack_top = static_cast<char*>(stack) + kStackBytes - colour;
    return fiber;
  }
  Fiber* fiber = free_fibers.back();
  free_fibers.pop_back();
  char* const stack_top = fiber->stack_top;
  *fiber = Fiber{};
  fiber->stack_top = stack_top;
  return fiber;
}

void add_thread(Block& block, unsigned thread) {
  Fiber* fiber = take_fiber();
  const unsigned width = block.grid->threads.x;
  fiber->thread = thread;
  fiber->lane = thread % 32;
  fiber->index = {thread % width, thread / width, 0};
  fiber->block = &block;
  fiber->warp = &block.warps[thread / 32];
  fiber->where = "its start";
  // As emulator_switch leaves a stack: six registers, where to go on, and nothing to return to.
  void** top = reinterpret_cast<void**>(fiber->stack_top);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(entry);
  std::fill(top - 8, top - 2, nullptr);
  fiber->stack_pointer = top - 8;
  block.cluster->fibers.push_back(fiber);
}

void fill_block(Block& block, unsigned index) {
  const Grid& grid = *block.grid;
  block.index = {index % grid.blocks.x, index / grid.blocks.x % grid.blocks.y,
                 index / grid.blocks.x / grid.blocks.y};
  block.threads = block.alive = int(grid.threads.x * grid.threads.y * grid.threads.z);
  block.warps.resize(size_t(block.threads + 31) / 32);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    block.warps[w].size = std::min(32, block.threads - 32 * int(w));
  }
  // A launch's bytes end where the window does: what is beyond them is a fault.
  const size_t dynamic = (grid.shared_bytes + 127) / 128 * 128;
  block.window_bytes = kStaticBytes + (dynamic + kPage - 1) / kPage * kPage;
  block.window = take_window(block.window_bytes);
  std::memset(block.window, 0xAB, block.window_bytes);
  block.dynamic = block.window + block.window_bytes - dynamic;
  for (int thread = 0; thread < block.threads; ++thread) add_thread(block, unsigned(thread));
}

Cluster* add_cluster(Grid& grid, unsigned first) {
  grid.live.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *grid.live.back();
  cluster.grid = &grid;
  cluster.blocks.resize(size_t(grid.cluster));
  for (int rank = 0; rank < grid.cluster; ++rank) {
    Block& block = cluster.blocks[size_t(rank)];
    block.grid = &grid;
    block.cluster = &cluster;
    block.rank = rank;
    fill_block(block, first + unsigned(rank));
    cluster.alive += block.threads;
  }
  return &cluster;
}

void end_clusters(Grid& grid) {
  for (const auto& cluster : grid.live) {
    if (!cluster->deliveries.empty()) fail("%s ends with copies under way", grid.name.c_str());
    for (Fiber* fiber : cluster->fibers) free_fibers.push_back(fiber);
    for (const Block& block : cluster->blocks) give_window_back(block.window, block.window_bytes);
  }
  grid.live.clear();
}

bool can_go_on(const Fiber& fiber) {
  if (fiber.done) return false;
  if (fiber.word != nullptr) return *fiber.word != fiber.seen;
  if (fiber.barrier != nullptr) return phase_has_ended(fiber.barrier, fiber.parity);
  return !fiber.at_grid_wait || fiber.block->grid->released;
}

/** A warp's round: each of its lanes once, from one of them on. */
struct Round {
  Fiber* const* fibers;
  size_t lanes, from, next;
} warp_round;

/** The next lane of the round that can go on; null: it is over. */
Fiber* next_of_round() {
  Round& r = warp_round;
  while (r.next < r.lanes) {
    const size_t lane = r.from + r.next++;
    Fiber* fiber = r.fibers[lane < r.lanes ? lane : lane - r.lanes];
    if (can_go_on(*fiber)) return fiber;
  }
  return nullptr;
}

bool run_warp(const Task& task) {
  const size_t from = seed == 0 ? 0 : random_number() % task.lanes;
  warp_round = {&task.cluster->fibers[task.first], task.lanes, from, 0};
  current = next_of_round();
  if (current == nullptr) return false;
  emulator_switch(&scheduler_stack, current->stack_pointer);
  current = nullptr;
  return true;
}

/** Some warps for a while, some copies: with seed 0, all warps as far as they get. */
bool run_by_chance(std::vector<Task>& tasks, const Clusters& clusters) {
  bool any = false;
  if (seed == 0) {
    for (const Task& task : tasks) {
      while (run_warp(task)) any = true;
    }
    return any;
  }
  for (size_t i = tasks.size(); i > 1; --i) std::swap(tasks[i - 1], tasks[random_number() % i]);
  for (const Task& task : tasks) {
    if (task.cluster->alive == 0 || chance(3)) continue;
    const unsigned turns = 1 + random_number() % 40;
    for (unsigned i = 0; i < turns && run_warp(task); ++i) any = true;
  }
  for (Cluster* cluster : clusters) {
    std::vector<Delivery>& deliveries = cluster->deliveries;
    while (!deliveries.empty() && chance(2)) {
      std::swap(deliveries[random_number() % deliveries.size()], deliveries.back());
      deliver(deliveries.back());
      deliveries.pop_back();
      any = true;
    }
    for (int i = 0; cluster->has_staged && i < 8; ++i) {
      Fiber& fiber = *cluster->fibers[random_number() % cluster->fibers.size()];
      for (unsigned n = random_number() % 8; n > 0 && do_staged(fiber); --n) any = true;
    }
  }
  return any;
}

/** One round of everything that can be done at all. */
bool run_everything(const std::vector<Task>& tasks, const Clusters& clusters) {
  bool any = false;
  for (const Task& task : tasks) any |= run_warp(task);
  for (Cluster* cluster : clusters) {
    for (; !cluster->deliveries.empty(); any = true) {
      deliver(cluster->deliveries.back());
      cluster->deliveries.pop_back();
    }
    if (cluster->has_staged) {
      for (Fiber* fiber : cluster->fibers) {
        while (do_staged(*fiber)) any = true;
      }
      cluster->has_staged = false;
    }
  }
  return any;
}

[[noreturn]] void report_deadlock(const Grid& grid, const Clusters& clusters) {
  std::map<std::string, std::pair<int, std::string>> waiting;  // how many at a place, and one
  for (const Cluster* cluster : clusters) {
    for (const Fiber* fiber : cluster->fibers) {
      if (fiber->done) continue;
      auto& [count, example] = waiting[fiber->where];
      if (count++ == 0) {
        example = "block " + std::to_string(fiber->block->index.x) + " thread " +
                  std::to_string(fiber->thread);
      }
    }
  }
  std::string all;
  for (const auto& [where, who] : waiting) {
    all += "\n  " + std::to_string(who.first) + " at " + where + ", as " + who.second;
  }
  fail("%s is stuck; its threads wait:%s", grid.name.c_str(), all.c_str());
}

/** Until all threads have ended, or wait for the grid before: false. */
bool run_clusters(const Grid& grid, const Clusters& clusters) {
  std::vector<Task> tasks;
  for (Cluster* cluster : clusters) {
    const size_t threads = size_t(cluster->blocks[0].threads);
    for (size_t block = 0; block < cluster->fibers.size(); block += threads) {
      for (size_t t = 0; t < threads; t += 32) {
        tasks.push_back({cluster, block + t, std::min<size_t>(32, threads - t)});
      }
    }
  }
  while (run_by_chance(tasks, clusters) || run_everything(tasks, clusters)) {
  }
  const bool done = std::all_of(clusters.begin(), clusters.end(),
                                [](const Cluster* cluster) { return cluster->alive == 0; });
  if (!done && grid.released) report_deadlock(grid, clusters);
  return done;
}

Clusters pointers(const Grid& grid) {
  Clusters all;
  for (const auto& cluster : grid.live) all.push_back(cluster.get());
  return all;
}

/** The first threads of each cluster, in the order in which clusters run. */
std::vector<unsigned> firsts(const Grid& grid) {
  std::vector<unsigned> order;
  const unsigned blocks = grid.blocks.x * grid.blocks.y * grid.blocks.z;
  for (unsigned i = 0; i < blocks; i += unsigned(grid.cluster)) order.push_back(i);
  for (size_t i = order.size(); seed != 0 && i > 1; --i) {
    std::swap(order[i - 1], order[random_number() % i]);
  }
  return order;
}

/** A grid takes its place before the one that it follows has ended. */
void start_early(Grid& grid) {
  grid.released = false;
  for (unsigned first : firsts(grid)) add_cluster(grid, first);
}

/** Such a grid: up to griddepcontrol.wait, as all of it is there, or to flags that are not set. */
void go_ahead(Grid& grid) {
  if (run_clusters(grid, pointers(grid))) {
    fail("%s ends before the grid that it follows", grid.name.c_str());
  }
}

void run_grid(Grid& grid) {
  if (!grid.live.empty()) {
    grid.released = true;
    run_clusters(grid, pointers(grid));
    return end_clusters(grid);
  }
  const std::vector<unsigned> order = firsts(grid);
  const size_t together = chance(2) ? 1 + random_number() % 4 : 1;
  for (size_t i = 0; i < order.size(); i += together) {
    for (size_t j = i; j < std::min(order.size(), i + together); ++j) add_cluster(grid, order[j]);
    run_clusters(grid, pointers(grid));
    end_clusters(grid);
  }
}

}  // namespace

void begin(const std::string& what, unsigned seed_of_it) {
  task = what;
  seed = random_state = seed_of_it;
}

uint32_t random_number() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(random_state >> 33);
}
bool chance(unsigned one_in) { return seed != 0 && random_number() % one_in == 0; }

std::string whereabouts() {
  std::string text = " [" + task;
  if (current != nullptr) {
    const uint3& block = current->block->index;
    text += ", " + current->block->grid->name + ", block " + std::to_string(block.x) + " " +
            std::to_string(block.y) + ", thread " + std::to_string(current->thread);
  }
  return text + "]";
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "emulated CUDA: ");
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "%s\n", whereabouts().c_str());
  std::fflush(stdout);
  _exit(1);
}

// Lanes that wait at one place follow each other without the scheduler in between: then a processor
// foresees where each return leads.
[[gnu::noinline]] void yield() {
  Fiber& before = *current;
  current = next_of_round();
  emulator_switch(&before.stack_pointer,
                  current == nullptr ? scheduler_stack : current->stack_pointer);
}

void wait_for(const unsigned& word, unsigned seen, const char* where) {
  current->where = where;
  current->word = &word;
  current->seen = seen;
  while (word == seen) yield();
  current->word = nullptr;
}

Recording record(const std::function<void()>& launch) {
  flush();
  Recording kept;
  recording = &kept;
  launch();
  recording = nullptr;
  return kept;
}

bool is_recording() { return recording != nullptr; }

void replay(const Recording& kept) {
  for (const auto& grid : kept) {
    auto again = std::make_unique<Grid>();
    again->name = grid->name;
    again->blocks = grid->blocks;
    again->threads = grid->threads;
    again->shared_bytes = grid->shared_bytes;
    again->body = grid->body;
    again->cluster = grid->cluster;
    again->is_early = grid->is_early;
    enqueue(std::move(again));
  }
}

void enqueue(std::unique_ptr<Grid> grid) {
  const std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  if (current != nullptr) fail("a kernel launches another");
  if (grid->blocks.x == 0 || grid->blocks.y == 0) fail("%s has no blocks", grid->name.c_str());
  if (recording != nullptr) return recording->push_back(std::move(grid));
  if (!grid->is_early) flush();
  queue.push_back(std::move(grid));
}

void flush() {
  constexpr unsigned kMostEarly = 40000;  // threads whose stacks are there together
  const std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  if (recording != nullptr) fail("somebody waits for the device while a graph is recorded");
  if (queue.empty()) return;
  const std::vector<std::unique_ptr<Grid>> work = std::move(queue);
  queue.clear();
  const bool last_first = chance(2);
  for (size_t i = 0; seed % 2 == 1 && i < work.size(); ++i) {
    Grid& grid = *work[last_first ? work.size() - 1 - i : i];
    if (!grid.is_early || grid.blocks.x * grid.threads.x > kMostEarly) continue;
    start_early(grid);
    if (!chance(3)) go_ahead(grid);
  }
  for (size_t i = 0; i < work.size(); ++i) {
    // A grid may be slow: then those after it go as far as flags let them.
    const bool is_slow = seed % 2 == 1 && chance(2);
    for (size_t j = i + 1; is_slow && j < work.size(); ++j) {
      if (!work[j]->live.empty()) go_ahead(*work[j]);
    }
    run_grid(*work[i]);
  }
}

}  // namespace emulator
