#include "tail_seeds.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <random>

namespace pariskv {

namespace {

constexpr uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

struct SipState {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1, v1 = turned(v1, 13) ^ v0, v0 = turned(v0, 32);
    v2 += v3, v3 = turned(v3, 16) ^ v2;
    v0 += v3, v3 = turned(v3, 21) ^ v0;
    v2 += v1, v1 = turned(v1, 17) ^ v2, v2 = turned(v2, 32);
  }
  void take(uint64_t word) {
    v3 ^= word;
    round(), round();
    v0 ^= word;
  }
};

}  // namespace

uint64_t sip_hash(const SipKey& key, uint64_t number) {
  SipState state{key.low ^ 0x736f6d6570736575u, key.high ^ 0x646f72616e646f6du,
                 key.low ^ 0x6c7967656e657261u, key.high ^ 0x7465646279746573u};
  state.take(number);
  state.take(uint64_t{8} << 56);  // the length of what was hashed
  state.v2 ^= 0xff;
  state.round(), state.round(), state.round(), state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

SipKey drawn_key() {
  SipKey key{};
#if defined(__linux__) && defined(SYS_getrandom)
  if (syscall(SYS_getrandom, &key, sizeof key, 0) == long(sizeof key)) return key;
#endif
  std::random_device device;
  const auto word = [&] { return uint64_t{device()} << 32 | device(); };
  key.low = word();
  key.high = word();
  return key;
}

}  // namespace pariskv
