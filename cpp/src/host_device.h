/**
 * Functions that device code calls, too, with the same bits: on both sides plain arithmetic rounds
 * every operation once. The flags against fused multiply-adds are in CMakeLists.txt and
 * cmake/cuda.cmake. A constexpr function needs no macro.
 */
#pragma once

#ifdef __CUDACC__
#define PKV_HOST_DEVICE __host__ __device__
#else
#define PKV_HOST_DEVICE
#endif
