/**
 * A query, spread over a warp: element r of a lane is dimension 32 r + lane. Definitions are in
 * query_impl.cuh.
 */
#pragma once

#include <cstdint>

namespace pariskv::cuda::device {

/** The rows of q that one searcher stands for. */
template <typename Element>
struct QueryRows {
  const Element* first;
  int64_t stride;  // in elements
  int members;     // one, or the group whose mean is taken
  bool mean;
  int head_dim;
};

/** x, zeros before, becomes the query of one searcher. All lanes of a warp. */
template <typename Element, int kWords>
__device__ __forceinline__ void load_query(const QueryRows<Element>& rows, float (&x)[kWords]);

/**
 * x becomes H diag(s) x; false, and all zero, where that is not finite. All lanes of a warp.
 * @param negative  (kWords) sign bits: bit d % 32 of word d / 32 is that of dimension d
 */
template <int kWords>
__device__ __forceinline__ bool rotate(const uint32_t* negative, float (&x)[kWords]);

}  // namespace pariskv::cuda::device
