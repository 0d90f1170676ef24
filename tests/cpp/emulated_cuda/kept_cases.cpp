// Cases of HARD-KV: what is kept is equal bit for bit after every step.
#include <utility>

#include "cases.h"

namespace pariskv::test {

namespace {

HardKV& own(Config& config) { return std::get<HardKV>(config.policy); }

Case make(const char* name, const std::function<void(Case&, Config&)>& change) {
  Case c = life_of(HardKV(), std::string("kept_") + name, 300);
  own(c.config).most = 60;
  own(c.config).p = .8;
  change(c, c.config);
  return c;
}

}  // namespace

Case life_of(const PolicyConfig& policy, std::string name, int64_t tokens) {
  Case c;
  c.name = std::move(name);
  c.config.query_heads = 8;
  c.config.kv_heads = 2;
  c.config.head_dim = 128;
  c.config.dtype = DType::kBFloat16;
  c.config.policy = policy;
  c.config.local = 16;
  c.config.update = 8;
  c.config.segment_tokens = 64;
  c.config.placement = Placement::kHost;
  c.config.threads = 1;
  c.tokens = tokens;
  c.queries = true;
  c.steps = 20;  // the prompt's choice, those of two flushes, and steps after them
  return c;
}

std::vector<Case> kept_cases() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  return {
      make("rows", [](Case& c, Config&) { c.device = 0, c.twin = 1; }),
      make("without_queries", [](Case& c, Config&) { c.queries = false; }),
      make("fixed_number",
           [](Case&, Config& k) {
             own(k).p = 1, own(k).metric = KeepMetric::kAttention, own(k).most = 24;
           }),
      make("more_than_a_block_of_threads",
           [](Case& c, Config& k) {
             own(k).most = 4000, own(k).p = .95, own(k).least = 30, c.tokens = 5500, c.steps = 9;
             k.segment_tokens = 1024, own(k).pool = 63, c.device = 0, c.twin = 5;
           }),
      make("float32_64_in_chunks",
           [](Case& c, Config& k) {
             k.dtype = kFloat, k.head_dim = 64, c.chunks = 4, c.softcap = 20, c.sink_bias = true;
           }),
      make("float32_512",
           [](Case& c, Config& k) { k.dtype = kFloat, k.head_dim = 512, c.steps = 9; }),
      make("float16_256_on_the_device",
           [](Case&, Config& k) {
             k.dtype = kHalf, k.head_dim = 256, k.placement = Placement::kDevice;
           }),
      make("keys_80_values_192_in_strides",
           [](Case& c, Config& k) {
             k.head_dim = 80, k.value_dim = 192, c.gap = 3, c.batch = 3, c.tokens = 200;
           }),
      make("float16_96_of_a_group_of_twenty",
           [](Case& c, Config& k) {
             k.dtype = kHalf, k.head_dim = 96, k.query_heads = 20, k.kv_heads = 1;
             c.softcap = 10;
           }),
      make("group_of_one", [](Case&, Config& k) { k.query_heads = 2; }),
      make("group_of_five_192", [](Case&, Config& k) { k.query_heads = 10, k.head_dim = 192; }),
      make("batch_in_one_call",
           [](Case& c, Config& k) {
             c.batch = 6, c.packed = true, c.tokens = 150, k.kv_heads = 4, k.head_dim = 64;
           }),
      make("flush_fork_and_truncate",
           [](Case& c, Config& k) {
             c.steps = 40, c.flush_after = 6, c.fork_after = 13, c.truncate_after = 17;
             c.truncate_by = 150, own(k).patience = 3;
           }),
      make("truncate_to_a_few",
           [](Case& c, Config&) { c.steps = 30, c.truncate_after = 9, c.truncate_by = 295; }),
      make("replayed",
           [](Case& c, Config&) {
             c.replayed = true, c.steps = 40, c.flush_after = 5, c.fork_after = 20;
             c.truncate_after = 11, c.truncate_by = 100;
           }),
      make("idle_slots_replayed",
           [](Case& c, Config&) {
             c.idle = c.replayed = true, c.batch = 2, c.steps = 20, c.flush_after = 5;
           }),
      make("replayed_before_anything_is_kept",
           [](Case& c, Config& k) {
             c.replayed = true, c.queries = false, c.batch = 2, c.tokens = 60;
             k.dense_below = 70, c.steps = 30;
           }),
      make("rows_dropped",
           [](Case& c, Config& k) {
             own(k).placement = ZoneRows::kDropped;
             c.steps = 40, c.batch = 2, c.flush_after = 6, c.fork_after = 13;
             c.truncate_after = 30, c.truncate_by = 5;
           }),
      make("rows_dropped_and_queries_cut",
           [](Case& c, Config& k) {
             own(k).placement = ZoneRows::kDropped;
             k.local = 48, k.update = 1, c.steps = 7, c.truncate_after = 2, c.truncate_by = 40;
           }),
      make("rows_dropped_replayed",
           [](Case& c, Config& k) {
             own(k).placement = ZoneRows::kDropped, c.replayed = true, c.queries = false;
             k.placement = Placement::kDevice, c.steps = 40, c.fork_after = 20;
           }),
      make("equal_keys", [](Case& c, Config& k) { c.equal_keys = true, own(k).p = .5; }),
      make("infinite", [](Case& c, Config&) { c.infinite = true; }),
      make("infinite_float16", [](Case& c, Config& k) { c.infinite = true, k.dtype = kHalf; }),
      make("infinite_float32", [](Case& c, Config& k) { c.infinite = true, k.dtype = kFloat; }),
      make("hostile", [](Case& c, Config&) { c.hostile = true; }),
      make("hostile_float32", [](Case& c, Config& k) { c.hostile = true, k.dtype = kFloat; }),
  };
}

}  // namespace pariskv::test
