// What tokens and sequences take at most, before there is a cache.
#include "check.h"
#include "ledger.h"
#include "pariskv/config.h"

namespace pariskv {

namespace {

void check(const char* verb, const char* argument, int64_t given, int64_t least, int64_t most,
           const char* what) {
  if (given >= least && given <= most) return;
  fail("[", verb, "] ", argument, ": expected ", least, " to ", most, what, ", got ", given);
}

/** Rows stay: with a budget above the bound, none have to leave. */
Config staying(const Config& config) {
  Config own = config.resolved();
  if (own.placement == Placement::kAuto) own.placement = Placement::kDevice;
  return own;
}

}  // namespace

int64_t Footprint::at(Place place) const {
  int64_t bytes = 0;
  for (const Entry& entry : entries) bytes += entry.place == place ? entry.bytes : 0;
  return bytes;
}

int64_t Footprint::of(std::string_view name) const {
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry.bytes;
  }
  return 0;
}

Footprint Config::footprint(const Load& load) const {
  constexpr int64_t kMostSequences = 1 << 20, kMostOfAll = int64_t{1} << 40;
  check("footprint", "longest", load.longest, 1, kMostTokens, " tokens");
  check("footprint", "sequences", load.sequences, 0, kMostSequences, "");
  check("footprint", "multiple", load.multiple, 1, kMostTokens, " tokens");
  if (load.tokens) {
    check("footprint", "tokens", *load.tokens, 0, kMostOfAll, "");
  } else {
    check("footprint", "sequences", load.sequences, 0, kMostOfAll / load.longest,
          " of so many tokens");
  }
  validate();
  const Config own = resolved();
  return Ledger(own, load.longest).footprint(load);
}

Bytes Config::bytes_per_token(int64_t most_tokens) const {
  check("bytes_per_token", "most_tokens", most_tokens, 1, kMostTokens, " tokens");
  validate();
  const Config own = staying(*this);
  const Footprint found = Ledger(own, most_tokens).footprint({most_tokens, 0, 1, 1});
  return {found.at(Place::kDevice), found.at(Place::kHost)};
}

Bytes Config::bytes_per_sequence(int64_t most_tokens, int64_t multiple) const {
  check("bytes_per_sequence", "most_tokens", most_tokens, 1, kMostTokens, " tokens");
  check("bytes_per_sequence", "multiple", multiple, 1, kMostTokens, " tokens");
  validate();
  const Config own = staying(*this);
  return {Ledger(own, most_tokens).footprint({most_tokens, 1, 0, multiple}).at(Place::kDevice), 0};
}

}  // namespace pariskv
