// Cases of PRKV: pages that steps find are equal to the CPU's.
#include "cases.h"

namespace pariskv::test {

namespace {

PRKV& own(Config& config) { return std::get<PRKV>(config.policy); }

Case make(const char* name, const std::function<void(Case&, Config&)>& change) {
  Case c = life_of(PRKV(), std::string("pages_") + name, 400);
  own(c.config).budget = 96;
  own(c.config).page = 8;
  own(c.config).static_share = .25;
  c.config.placement = Placement::kHost;
  change(c, c.config);
  return c;
}

}  // namespace

std::vector<Case> page_cases() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  return {
      make("and_kept_rows", [](Case& c, Config&) { c.device = 0, c.twin = 1; }),
      make("alone",
           [](Case& c, Config& k) {
             own(k).static_share = 0, c.queries = false, c.device = 0, c.twin = 2;
           }),
      make("none", [](Case&, Config& k) { own(k).static_share = 1; }),
      make("by_agreement", [](Case&, Config& k) { own(k).static_share = std::nullopt; }),
      make("without_queries", [](Case& c, Config&) { c.queries = false; }),
      make("of_64_by_the_box",
           [](Case& c, Config& k) {
             own(k).page = 64, own(k).budget = 512, own(k).digest = PageDigest::kMax;
             c.tokens = 2500, k.update = 64, k.segment_tokens = 192, c.device = 4, c.twin = 5;
           }),
      make("of_16_float32_64_in_chunks",
           [](Case& c, Config& k) {
             own(k).page = 16, k.dtype = kFloat, k.head_dim = 64, c.chunks = 4, c.softcap = 20;
             c.sink_bias = true;
           }),
      make("of_32_float32_512",
           [](Case& c, Config& k) {
             own(k).page = 32, k.dtype = kFloat, k.head_dim = 512, c.steps = 9;
           }),
      make("float16_256_on_the_device",
           [](Case&, Config& k) {
             k.dtype = kHalf, k.head_dim = 256, k.placement = Placement::kDevice;
           }),
      make("keys_80_values_192_in_strides",
           [](Case& c, Config& k) {
             k.head_dim = 80, k.value_dim = 192, c.gap = 3, c.batch = 3, c.tokens = 300;
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
             c.batch = 6, c.packed = true, c.tokens = 250, k.kv_heads = 4, k.head_dim = 64;
           }),
      make("flush_fork_and_truncate",
           [](Case& c, Config&) {
             c.steps = 40, c.flush_after = 6, c.fork_after = 13, c.truncate_after = 17;
             c.truncate_by = 150;
           }),
      make("truncate_to_a_few",
           [](Case& c, Config&) { c.steps = 30, c.truncate_after = 9, c.truncate_by = 395; }),
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
             c.replayed = true, c.queries = false, c.batch = 2, c.tokens = 110;
             k.dense_below = 120, c.steps = 40;
           }),
      make("more_rows_than_a_block_lists",
           [](Case& c, Config& k) {
             own(k).budget = 4000, own(k).static_share = .1, k.update = 64, k.local = 64;
             c.tokens = 6000, k.segment_tokens = 1024, c.steps = 3, c.device = 5, c.twin = 0;
             k.head_dim = 64, k.kv_heads = 1, k.query_heads = 4;
           }),
      make("replayed_with_a_refresh_from_the_best_pages",
           [](Case& c, Config& k) {
             own(k).budget = 512, own(k).page = 64, k.update = 64, k.local = 64;
             c.tokens = 8640, k.segment_tokens = 1024, c.steps = 70, c.replayed = true;
             k.head_dim = 64, k.kv_heads = 1, k.query_heads = 2;
           }),
      make("small_row_cache", [](Case& c, Config& k) { k.row_cache = 40, c.twin = 3; }),
      make("no_row_cache", [](Case&, Config& k) { k.row_cache = 0; }),
      make("equal_keys", [](Case& c, Config&) { c.equal_keys = true; }),
      make("infinite", [](Case& c, Config&) { c.infinite = true; }),
      make("infinite_float16", [](Case& c, Config& k) { c.infinite = true, k.dtype = kHalf; }),
      make("infinite_float32", [](Case& c, Config& k) { c.infinite = true, k.dtype = kFloat; }),
      make("hostile", [](Case& c, Config&) { c.hostile = true; }),
      make("hostile_float32", [](Case& c, Config& k) { c.hostile = true, k.dtype = kFloat; }),
  };
}

}  // namespace pariskv::test
