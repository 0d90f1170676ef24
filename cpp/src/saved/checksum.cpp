#include "saved/checksum.h"

#include <cstring>

namespace pariskv {

namespace {

constexpr uint64_t kPrimes[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

uint64_t mixed(uint64_t sum, uint64_t word) {
  return rotated(sum + word * kPrimes[1], 31) * kPrimes[0];
}

template <typename Word>
uint64_t take(const unsigned char*& data) {
  Word word;  // on the little-endian machines that this library is for
  std::memcpy(&word, data, sizeof word);
  data += sizeof word;
  return word;
}

}  // namespace

uint64_t checksum_of(const void* data, int64_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  const unsigned char* const end = next + bytes;
  uint64_t hash = kPrimes[4];
  if (bytes >= 32) {
    uint64_t lanes[] = {kPrimes[0] + kPrimes[1], kPrimes[1], 0, 0 - kPrimes[0]};
    while (end - next >= 32) {
      for (uint64_t& lane : lanes) lane = mixed(lane, take<uint64_t>(next));
    }
    hash =
        rotated(lanes[0], 1) + rotated(lanes[1], 7) + rotated(lanes[2], 12) + rotated(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = (hash ^ mixed(0, lane)) * kPrimes[0] + kPrimes[3];
  }
  hash += uint64_t(bytes);
  while (end - next >= 8) {
    hash = rotated(hash ^ mixed(0, take<uint64_t>(next)), 27) * kPrimes[0] + kPrimes[3];
  }
  if (end - next >= 4) {
    hash = rotated(hash ^ take<uint32_t>(next) * kPrimes[0], 23) * kPrimes[1] + kPrimes[2];
  }
  while (next < end) hash = rotated(hash ^ take<uint8_t>(next) * kPrimes[4], 11) * kPrimes[0];
  hash = (hash ^ hash >> 33) * kPrimes[1];
  hash = (hash ^ hash >> 29) * kPrimes[2];
  return hash ^ hash >> 32;
}

}  // namespace pariskv
