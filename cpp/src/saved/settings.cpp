#include "saved/settings.h"

#include <cstdio>
#include <variant>

#include "check.h"
#include "pariskv/version.h"

namespace pariskv {

namespace {

/** So many digits that it is the same number again. */
std::string exact(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

std::string text_of(const std::vector<ScheduleStep>& schedule) {
  std::string text;
  for (const ScheduleStep& step : schedule) {
    text += (text.empty() ? "" : " ") + std::to_string(step.from_tokens) + ":" +
            exact(step.candidate_ratio) + ":" + exact(step.vote_ratio);
  }
  return text;
}

const char* name_of(Scorer scorer) { return scorer == Scorer::kVotes ? "votes" : "sign_norm"; }
const char* name_of(GroupRule rule) {
  return rule == GroupRule::kMeanQuery ? "mean_query" : "attention_mass";
}
const char* name_of(TailRule rule) { return rule == TailRule::kSample ? "sample" : "none"; }

/**
 * Of a policy: summaries and state are made with the settings that must match. The seed is that of
 * the signs: what a tail is drawn by is the sequence's.
 */
void add(const ParisKV& policy, std::vector<Setting>& settings) {
  settings.push_back({"policy", "pariskv", true});
  settings.push_back({"policy.scorer", name_of(policy.scorer), true});
  settings.push_back({"policy.block", std::to_string(policy.block), true});
  settings.push_back({"policy.seed", std::to_string(policy.signs_seed()), true});
  settings.push_back({"policy.top_k", std::to_string(policy.top_k), false});
  settings.push_back({"policy.group_rule", name_of(policy.group_rule), false});
  settings.push_back({"policy.schedule", text_of(policy.schedule), false});
  settings.push_back(
      {"policy.min_candidates_per_row", std::to_string(policy.min_candidates_per_row), false});
  settings.push_back({"policy.tail", name_of(policy.tail), false});
  settings.push_back({"policy.tail_rows", std::to_string(policy.tail_rows), false});
  settings.push_back({"policy.error", policy.error ? exact(*policy.error) : "none", false});
}

/** Not stored, see Needs::fits_a_file: the name is for messages. */
void add(const HardKV&, std::vector<Setting>& settings) {
  settings.push_back({"policy", "hardkv", true});
}

/** The same. */
void add(const PRKV&, std::vector<Setting>& settings) {
  settings.push_back({"policy", "prkv", true});
}

/** The value of a name in lines of "name=value"; empty: there is none. */
std::string value_in(const std::string& text, const std::string& name) {
  const std::string all = "\n" + text, start = "\n" + name + "=";
  const size_t found = all.find(start);
  if (found == std::string::npos) return {};
  const size_t begin = found + start.size();
  return all.substr(begin, all.find('\n', begin) - begin);
}

}  // namespace

std::vector<Setting> settings_of(const Config& config) {
  std::vector<Setting> settings = {
      {"layers", std::to_string(config.layers), true},
      {"query_heads", std::to_string(config.query_heads), true},
      {"kv_heads", std::to_string(config.kv_heads), true},
      {"head_dim", std::to_string(config.head_dim), true},
      {"value_dim", std::to_string(config.value_dim), true},
      {"dtype", name_of(config.dtype), true},
      {"segment_tokens", std::to_string(config.segment_tokens), true},
      {"sink", std::to_string(config.sink), true},
      {"local", std::to_string(config.local), false},
      {"update", std::to_string(config.update), false},
      {"dense_below", std::to_string(config.searched_from()), false},
      {"kv_dtype", config.kv_dtype == KVDType::kInt8 ? "int8" : "auto", true, "auto"},
  };
  std::visit([&](const auto& policy) { add(policy, settings); }, config.policy);
  settings.push_back({"written_by", "pariskv " PARISKV_VERSION_STRING, false});
  return settings;
}

std::string text_of(const std::vector<Setting>& settings) {
  std::string text;
  for (const Setting& setting : settings) text += setting.name + "=" + setting.value + "\n";
  return text;
}

void check_settings(const std::string& path, const std::string& text, const Config& config) {
  for (const Setting& own : settings_of(config)) {
    if (!own.must_match) continue;
    std::string found = value_in(text, own.name);
    if (found.empty()) found = own.before;
    if (found == own.value) continue;
    fail("[load] path: expected a sequence of a cache with ", own.name, " ", own.value,
         " as this one, got ", found.empty() ? "none" : found, " in ", path);
  }
}

}  // namespace pariskv
