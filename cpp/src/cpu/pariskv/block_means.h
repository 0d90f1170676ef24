/** Means of blocks and the balance of channels, on the CPU. */
#pragma once

#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "policy/pariskv/jobs.h"

namespace pariskv::cpu {

/** Sets the balance of all heads from a zone's first keys. */
void set_balance(ThreadPool& pool, const Kernels& kernels, const EncodeArgs& args,
                 const EncodeJob& job);

/**
 * Stores the mean of the keys at [begin, end): a block, or the part of it that is in the zone.
 * @param gain, shift  (rotated_dim) written: key * gain + shift is the residual of a key
 */
void store_mean(const Kernels& kernels, const EncodeArgs& args, const EncodeJob& job, int64_t head,
                int64_t begin, int64_t end, float* gain, float* shift);

}  // namespace pariskv::cpu
