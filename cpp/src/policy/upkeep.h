/**
 * Requests of policies to a backend between steps, and a backend's report of a search: one type for
 * each verb of a policy's own. A backend visits them once.
 */
#pragma once

#include <variant>

#include "policy/hardkv/trace.h"
#include "policy/hardkv/upkeep.h"
#include "policy/pariskv/trace.h"
#include "policy/pariskv/upkeep.h"
#include "policy/prkv/trace.h"
#include "policy/prkv/upkeep.h"

namespace pariskv {

using Upkeep =
    std::variant<ParisKVEncode, ParisKVForget, ParisKVObserve, HardKVKeep, PRKVDigest, PRKVKeep>;

/** Empty (monostate): all of the zone was attended to. */
using Trace = std::variant<std::monostate, ParisKVTrace, HardKVTrace, PRKVTrace>;

}  // namespace pariskv
