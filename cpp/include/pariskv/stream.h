#pragma once

namespace pariskv {

/**
 * The queue of device work that a call joins.
 *
 * On a GPU `handle` is the `cudaStream_t`, passed as a plain pointer so that no
 * CUDA header is needed here; null is CUDA's default stream. On the CPU it is ignored:
 * a call has done its work when it returns.
 */
struct Stream {
  void* handle = nullptr;
};

}  // namespace pariskv
