/** The threads that a step's work is done by. */
#pragma once

#include <memory>

#include "pariskv/executor.h"

namespace pariskv::ggml {

/**
 * OpenMP's team of the calling thread, where the process has GNU's or LLVM's runtime: ggml's own
 * threads, which are awake from the node before. Two pools would fight for the cores.
 * @return null where there is no such runtime: a cache then starts its own threads
 */
std::shared_ptr<Executor> openmp_team(int threads);

}  // namespace pariskv::ggml
