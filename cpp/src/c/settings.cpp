#include "c/settings.h"

#include "c/status.h"
#include "c/structs.h"

namespace pariskv::c {

namespace {

constexpr double kNoShare = -1;  // of pariskv_policy_prkv::static_share: it is found by itself

void check_reserved(const std::string& where, int32_t value) {
  if (value == 0) return;
  fail(where, ".reserved: expected 0, got ", value, ": the struct's init call sets it");
}

pariskv_policy_pariskv settings_of(const ParisKV& policy) {
  pariskv_policy_pariskv settings{};
  settings.size = sizeof settings;
  settings.top_k = policy.top_k;
  settings.scorer = int32_t(policy.scorer);
  settings.group_rule = int32_t(policy.group_rule);
  settings.min_candidates_per_row = policy.min_candidates_per_row;
  settings.seed = policy.signs_seed();
  settings.block = policy.block;
  settings.tail_rows = policy.tail_rows;
  settings.error = policy.error.value_or(0);
  settings.tail = int32_t(policy.tail);
  settings.secret_seed = policy.seed ? 0 : 1;
  return settings;
}

ParisKV policy_of(const std::string& where, const pariskv_policy_pariskv* given) {
  const auto settings = taken(where, given, settings_of(ParisKV()));
  ParisKV policy;
  policy.top_k = settings.top_k;
  policy.scorer = enum_of<Scorer>(where + ".scorer", settings.scorer, {"sign_norm", "votes"});
  policy.group_rule = enum_of<GroupRule>(where + ".group_rule", settings.group_rule,
                                         {"attention_mass", "mean_query"});
  policy.tail = enum_of<TailRule>(where + ".tail", settings.tail, {"own", "none", "sample"});
  policy.min_candidates_per_row = settings.min_candidates_per_row;
  if (settings.secret_seed != 0 && settings.secret_seed != 1) {
    fail(where, ".secret_seed: expected 0 or 1, got ", settings.secret_seed);
  }
  if (settings.secret_seed == 0) {
    policy.seed = settings.seed;
  } else {
    policy.seed.reset();
  }
  policy.block = settings.block;
  policy.tail_rows = settings.tail_rows;
  if (settings.error != 0) policy.error = settings.error;
  constexpr int64_t kMostSteps = 1024;
  if (settings.schedule_steps < 0 || settings.schedule_steps > kMostSteps) {
    fail(where, ".schedule_steps: expected 0 to ", kMostSteps, ", got ", settings.schedule_steps);
  }
  if (settings.schedule_steps > 0 && settings.schedule == nullptr) {
    fail(where, ".schedule: expected ", settings.schedule_steps, " steps, got a null pointer");
  }
  for (int64_t i = 0; i < settings.schedule_steps; ++i) {
    const pariskv_schedule_step& step = settings.schedule[i];
    policy.schedule.push_back({step.from_tokens, step.candidate_ratio, step.vote_ratio});
  }
  return policy;
}

pariskv_policy_hardkv settings_of(const HardKV& policy) {
  pariskv_policy_hardkv settings{};
  settings.size = sizeof settings;
  settings.most = policy.most;
  settings.p = policy.p;
  settings.least = policy.least;
  settings.metric = int32_t(policy.metric);
  settings.placement = int32_t(policy.placement);
  settings.pool = policy.pool;
  settings.patience = policy.patience;
  return settings;
}

HardKV policy_of(const std::string& where, const pariskv_policy_hardkv* given) {
  const auto settings = taken(where, given, settings_of(HardKV()));
  HardKV policy;
  policy.most = settings.most;
  policy.p = settings.p;
  policy.least = settings.least;
  policy.metric = enum_of<KeepMetric>(where + ".metric", settings.metric, {"attention", "snapkv"});
  policy.placement =
      enum_of<ZoneRows>(where + ".placement", settings.placement, {"host", "dropped"});
  policy.pool = settings.pool;
  policy.patience = settings.patience;
  return policy;
}

pariskv_policy_prkv settings_of(const PRKV& policy) {
  pariskv_policy_prkv settings{};
  settings.size = sizeof settings;
  settings.budget = policy.budget;
  settings.static_share = policy.static_share.value_or(kNoShare);
  settings.page = policy.page;
  settings.digest = int32_t(policy.digest);
  return settings;
}

PRKV policy_of(const std::string& where, const pariskv_policy_prkv* given) {
  const auto settings = taken(where, given, settings_of(PRKV()));
  check_reserved(where, settings.reserved);
  PRKV policy;
  policy.budget = settings.budget;
  if (settings.static_share == kNoShare) {
    policy.static_share.reset();
  } else {
    policy.static_share = settings.static_share;
  }
  policy.page = settings.page;
  policy.digest = enum_of<PageDigest>(where + ".digest", settings.digest, {"mean", "max"});
  return policy;
}

pariskv_borrowed_rows settings_of(const BorrowedRows& rows) {
  return {sizeof(pariskv_borrowed_rows), int32_t(rows.key), int32_t(rows.value),
          rows.key_head_stride, rows.value_head_stride};
}

BorrowedRows rows_of(const std::string& where, const pariskv_borrowed_rows* given) {
  const auto settings = taken(where, given, settings_of(BorrowedRows()));
  const auto type_of = [&](const char* half, int32_t type) {
    return enum_of<BorrowedType>(where + half, type, {"float32", "float16", "bfloat16", "q8_0"});
  };
  return {type_of(".key", settings.key), type_of(".value", settings.value),
          settings.key_head_stride, settings.value_head_stride};
}

/** All but the policy and borrowed rows. */
pariskv_config settings_of(const Config& config) {
  pariskv_config settings{};
  settings.size = sizeof settings;
  settings.layers = config.layers;
  settings.query_heads = config.query_heads;
  settings.kv_heads = config.kv_heads;
  settings.head_dim = config.head_dim;
  settings.value_dim = config.value_dim;
  settings.dtype = int32_t(config.dtype);
  settings.kv_dtype = int32_t(config.kv_dtype);
  settings.sink = config.sink;
  settings.local = config.local;
  settings.update = config.update;
  static_assert(PARISKV_DENSE_BY_BATCH == kDenseByBatch);
  settings.dense_below = config.dense_below;
  settings.device = int32_t(config.device.type);
  settings.device_index = config.device.index;
  settings.threads = config.threads;
  settings.segment_tokens = config.segment_tokens;
  settings.memory_budget = config.memory_budget;
  settings.host_budget = config.host_budget;
  settings.row_cache = config.row_cache;
  settings.placement = int32_t(config.placement);
  return settings;
}

}  // namespace

Config config_of(const pariskv_config* given) {
  const auto settings = taken("[config]", given, settings_of(Config()));
  check_reserved("[config]", settings.reserved);
  Config config;
  config.layers = settings.layers;
  config.query_heads = settings.query_heads;
  config.kv_heads = settings.kv_heads;
  config.head_dim = settings.head_dim;
  config.value_dim = settings.value_dim;
  config.dtype =
      enum_of<DType>("[config] dtype", settings.dtype, {"float32", "float16", "bfloat16"});
  config.kv_dtype = enum_of<KVDType>("[config] kv_dtype", settings.kv_dtype, {"auto", "int8"});
  config.sink = settings.sink;
  config.local = settings.local;
  config.update = settings.update;
  config.dense_below = settings.dense_below;
  config.device.type = enum_of<DeviceType>("[config] device", settings.device, {"cpu", "cuda"});
  config.device.index = settings.device_index;
  config.threads = settings.threads;
  config.segment_tokens = settings.segment_tokens;
  config.memory_budget = settings.memory_budget;
  config.host_budget = settings.host_budget;
  config.row_cache = settings.row_cache;
  config.placement =
      enum_of<Placement>("[config] placement", settings.placement, {"auto", "host", "device"});
  const int policies = int(settings.pariskv != nullptr) + int(settings.hardkv != nullptr) +
                       int(settings.prkv != nullptr);
  if (policies > 1) {
    fail("[config] pariskv, hardkv, prkv: expected the settings of one policy at most, got ",
         policies);
  }
  if (settings.pariskv != nullptr) config.policy = policy_of("[config] pariskv", settings.pariskv);
  if (settings.hardkv != nullptr) config.policy = policy_of("[config] hardkv", settings.hardkv);
  if (settings.prkv != nullptr) config.policy = policy_of("[config] prkv", settings.prkv);
  if (settings.borrowed != nullptr) {
    config.borrowed = rows_of("[config] borrowed", settings.borrowed);
  }
  return config;
}

Settings::Settings(const Config& config) : config_(settings_of(config)) {
  if (config.borrowed) {
    borrowed_ = settings_of(*config.borrowed);
    config_.borrowed = &borrowed_;
  }
  if (const auto* policy = std::get_if<ParisKV>(&config.policy)) {
    for (const ScheduleStep& step : policy->schedule) {
      schedule_.push_back({step.from_tokens, step.candidate_ratio, step.vote_ratio});
    }
    pariskv_ = settings_of(*policy);
    pariskv_.schedule = schedule_.data();
    pariskv_.schedule_steps = int64_t(schedule_.size());
    config_.pariskv = &pariskv_;
  } else if (const auto* kept = std::get_if<HardKV>(&config.policy)) {
    hardkv_ = settings_of(*kept);
    config_.hardkv = &hardkv_;
  } else if (const auto* paged = std::get_if<PRKV>(&config.policy)) {
    prkv_ = settings_of(*paged);
    config_.prkv = &prkv_;
  }
}

}  // namespace pariskv::c

using namespace pariskv;

pariskv_status pariskv_config_init(pariskv_config* config, size_t size) {
  return c::answer(
      [&] { c::fill("[config_init] config", config, size, c::settings_of(Config())); });
}

pariskv_status pariskv_borrowed_rows_init(pariskv_borrowed_rows* rows, size_t size) {
  return c::answer(
      [&] { c::fill("[borrowed_rows_init] rows", rows, size, c::settings_of(BorrowedRows())); });
}

pariskv_status pariskv_policy_pariskv_init(pariskv_policy_pariskv* policy, size_t size) {
  return c::answer(
      [&] { c::fill("[policy_pariskv_init] policy", policy, size, c::settings_of(ParisKV())); });
}

pariskv_status pariskv_policy_hardkv_init(pariskv_policy_hardkv* policy, size_t size) {
  return c::answer(
      [&] { c::fill("[policy_hardkv_init] policy", policy, size, c::settings_of(HardKV())); });
}

pariskv_status pariskv_policy_prkv_init(pariskv_policy_prkv* policy, size_t size) {
  return c::answer(
      [&] { c::fill("[policy_prkv_init] policy", policy, size, c::settings_of(PRKV())); });
}

pariskv_status pariskv_config_validate(const pariskv_config* config) {
  return c::answer([&] { c::config_of(config).validate(); });
}

pariskv_status pariskv_config_bytes_per_token(const pariskv_config* config, int64_t most_tokens,
                                              pariskv_bytes* bytes) {
  return c::answer([&] {
    const Config own = c::config_of(config);
    c::check_place("[bytes_per_token] bytes", bytes);
    const Bytes found = own.bytes_per_token(most_tokens);
    c::hand_out(bytes, pariskv_bytes{0, found.device, found.host});
  });
}

pariskv_status pariskv_config_bytes_per_sequence(const pariskv_config* config, int64_t most_tokens,
                                                 int64_t multiple, pariskv_bytes* bytes) {
  return c::answer([&] {
    const Config own = c::config_of(config);
    c::check_place("[bytes_per_sequence] bytes", bytes);
    const Bytes found = own.bytes_per_sequence(most_tokens, multiple);
    c::hand_out(bytes, pariskv_bytes{0, found.device, found.host});
  });
}
