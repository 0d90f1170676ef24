/** Numbers that a seed gives: SplitMix64, of which any one can be had alone. */
#pragma once

#include <cstdint>

namespace pariskv {

/** @param number  from 1 on */
constexpr uint64_t split_mix(uint64_t seed, uint64_t number) {
  uint64_t z = seed + number * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace pariskv
