/** GPUs to choose from: how many processors there are decides how kernels share their work. */
#pragma once

#include <vector>

namespace emulator {

struct FakeDevice {
  int processors;
  int clusters[5];  // of 1, 2, 4, 8 and 16 blocks: how many run at a time
  int major;        // of the compute capability
  int shared_bytes;
};

/** A large one first, then a few processors, some, very many, odd numbers, little shared memory. */
extern const std::vector<FakeDevice> devices;

}  // namespace emulator
