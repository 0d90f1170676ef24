// What threads do together: the lanes of a warp, a block's barrier, a cluster's, the grid before.
#include <cstring>

#include "device/ptx.cuh"
#include "machine.h"

namespace emulator {

namespace {

const char* name_of(Meeting meeting) {
  static const char* const names[] = {"nothing", "__syncwarp",  "a shuffle",
                                      "a vote",  "a reduction", "a matrix instruction"};
  return names[int(meeting)];
}

void check_block(Block& block) {
  if (block.arrived == 0 || block.arrived < block.alive) return;
  block.arrived = 0;
  block.sums[(block.generation + 1) % 2] = 0;
  ++block.generation;
}

void check_cluster(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived < cluster.alive) return;
  cluster.arrived = 0;
  ++cluster.generation;
}

}  // namespace

const Slot* meet(Meeting meeting, const void* data, size_t bytes) {
  Warp& warp = *current->warp;
  const unsigned generation = warp.generation;
  Slot* slots = warp.slots[generation % 2];
  if (bytes > 0) std::memcpy(slots[current->lane].words, data, bytes);
  if (warp.arrived == 0) warp.meeting = meeting;
  if (warp.meeting != meeting) {
    fail("lanes of a warp are at %s and at %s", name_of(warp.meeting), name_of(meeting));
  }
  if (++warp.arrived == warp.size) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_for(warp.generation, generation, name_of(meeting));
  }
  return slots;
}

void block_barrier(const char* where) {
  Block& block = *current->block;
  const unsigned generation = block.generation;
  ++block.arrived;
  check_block(block);
  if (block.generation == generation) wait_for(block.generation, generation, where);
}

int block_count(bool predicate) {
  Block& block = *current->block;
  int& sum = block.sums[block.generation % 2];
  sum += predicate;
  block_barrier("__syncthreads_count");
  return sum;
}

bool numbered_arrive(int id, int threads, bool predicate) {
  if (id < 1 || id > 15 || threads % 32 != 0) fail("barrier %d of %d threads", id, threads);
  NumberedBarrier& barrier = current->block->numbered[id];
  barrier.sums[barrier.generation % 2] += predicate;
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  barrier.sums[(barrier.generation + 1) % 2] = 0;
  ++barrier.generation;
  return true;
}

int numbered_count(int id, int threads, bool predicate) {
  NumberedBarrier& barrier = current->block->numbered[id];
  const unsigned generation = barrier.generation;
  const int& sum = barrier.sums[generation % 2];
  if (!numbered_arrive(id, threads, predicate)) {
    wait_for(barrier.generation, generation, "a barrier with a number");
  }
  return sum;
}

void leave_barriers(Fiber& fiber) {
  Warp& warp = *fiber.warp;
  if (warp.arrived > 0) {
    fail("a lane ends while others of its warp wait at %s", name_of(warp.meeting));
  }
  if (fiber.cluster_arrived) fail("ends between arrive and wait of the cluster's barrier");
  --fiber.block->alive;
  --fiber.block->cluster->alive;
  check_block(*fiber.block);
  check_cluster(*fiber.block->cluster);
}

}  // namespace emulator

namespace pariskv::cuda::device::ptx {

using namespace emulator;

void cluster_arrive() {
  Cluster& cluster = *current->block->cluster;
  if (current->cluster_arrived) fail("arrives twice at the cluster's barrier");
  current->cluster_arrived = true;
  current->cluster_generation = cluster.generation;
  ++cluster.arrived;
  check_cluster(cluster);
}

void barrier_cluster_wait_acquire() {
  Cluster& cluster = *current->block->cluster;
  if (!current->cluster_arrived) fail("waits at the cluster's barrier without having arrived");
  current->cluster_arrived = false;
  const unsigned generation = current->cluster_generation;
  if (cluster.generation == generation) {
    wait_for(cluster.generation, generation, "the cluster's barrier");
  }
}

void griddepcontrol_wait() {
  current->where = "griddepcontrol.wait";
  current->at_grid_wait = true;
  while (!current->block->grid->released) yield();
  current->at_grid_wait = false;
}

uint32_t ld_acquire_gpu(const uint32_t* word) {
  if (current->polled == word && current->polled_value == *word) wait_for(*word, *word, "a flag");
  current->polled = word;
  return current->polled_value = *word;
}

uint64_t ld_relaxed_gpu(const uint64_t* word) {
  ld_acquire_gpu(reinterpret_cast<const uint32_t*>(word) + 1);
  return *word;
}

}  // namespace pariskv::cuda::device::ptx
