/** The rules that a decode goes by: one type per policy. A backend visits them once per call. */
#pragma once

#include <variant>

#include "policy/hardkv/rules.h"
#include "policy/pariskv/rules.h"
#include "policy/prkv/rules.h"

namespace pariskv {

using Rules = std::variant<ParisKVRules, HardKVRules, PRKVRules>;

/** The most rows that a step selects per kv head. */
inline int64_t rows_per_head(const Rules& rules) {
  return std::visit([](const auto& own) { return own.rows_per_head(); }, rules);
}

/** See tail.h. */
inline int64_t tail_rows(const Rules& rules) {
  return std::visit([](const auto& own) { return own.tail_rows; }, rules);
}

}  // namespace pariskv
