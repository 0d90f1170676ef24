/** Configs and settings of policies, from C's structs to C++'s and back. */
#pragma once

#include <vector>

#include "pariskv/c_types.h"
#include "pariskv/config.h"
#include "pariskv/memory.h"

namespace pariskv::c {

Config config_of(const pariskv_config* given);

/** @param given  may be null */
Resources resources_of(const pariskv_resources* given);

/** A config as C sees it, and the memory that its pointers lead to. */
class Settings {
 public:
  explicit Settings(const Config& config);
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

  const pariskv_config& config() const { return config_; }

 private:
  pariskv_config config_{};
  pariskv_policy_pariskv pariskv_{};
  pariskv_policy_hardkv hardkv_{};
  pariskv_policy_prkv prkv_{};
  pariskv_borrowed_rows borrowed_{};
  std::vector<pariskv_schedule_step> schedule_;
};

}  // namespace pariskv::c
