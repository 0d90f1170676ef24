// The cases that are run.
#include "cases.h"

namespace pariskv::test {

namespace {

/** The settings of the policy that all cases have. */
ParisKV& own(Config& config) { return std::get<ParisKV>(config.policy); }

/** Of a prompt whose zone is open, in blocks of any size. */
constexpr int64_t kOpened = 1400;

constexpr auto make = search_case;

std::vector<Case> pariskv_cases() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  const auto votes = [](Config& config) { own(config).scorer = Scorer::kVotes; };
  const auto mean = [](Config& config) { own(config).group_rule = GroupRule::kMeanQuery; };
  const auto tail = [](Case& c, Config& config, int64_t rows) {
    own(config).block = 64, own(config).tail = TailRule::kSample, own(config).tail_rows = rows;
    c.queries = true, c.tokens = kOpened;
  };
  const auto budget = [=](Case& c, Config& config, int64_t rows, double error) {
    tail(c, config, rows), own(config).error = error, own(config).top_k = 60, c.errors = true;
  };
  const auto blocks = [](Case& c, Config& config, int64_t size) {
    own(config).block = size, c.queries = true, c.tokens = kOpened;
  };
  const auto narrow = [](Case& c, Config& config) {
    config.kv_dtype = KVDType::kInt8;
    c.flush_after = 6, c.truncate_after = 10, c.truncate_by = 150, c.steps = 14;
    config.update = 8, config.local = 16;
  };
  return {
      make("narrow", [=](Case& c, Config& k) { narrow(c, k); }),
      make("narrow_float16_80",
           [=](Case& c, Config& k) {
             narrow(c, k), k.dtype = kHalf, k.head_dim = 80, k.segment_tokens = 64, k.sink = 70;
             k.row_cache = 16, c.batch = 2, c.twin = 0;
           }),
      make("narrow_tail",
           [=](Case& c, Config& k) {
             // The 58th query and the huge key are at right angles: a last bit says which sign.
             narrow(c, k), tail(c, k, 32), c.steps = 12, c.twin = 4, c.attended = 50;
             c.chunks = 3, c.saved_after = 4;
           }),
      make("narrow_error_float32_512",
           [=](Case& c, Config& k) {
             narrow(c, k), budget(c, k, 32, .1), k.dtype = kFloat, k.head_dim = 512;
             k.kv_heads = 1, k.query_heads = 4, c.truncate_by = 500, c.steps = 12;
           }),
      make("narrow_hostile",
           [=](Case& c, Config& k) { narrow(c, k), tail(c, k, 32), c.hostile = true; }),
      make("narrow_infinite",
           [=](Case& c, Config& k) { narrow(c, k), tail(c, k, 32), c.infinite = true; }),
      make("narrow_rows_more_than_a_block_lists",
           [=](Case& c, Config& k) {
             narrow(c, k), tail(c, k, 32), c.tokens = 2600, own(k).top_k = 1300;
             own(k).min_candidates_per_row = 1, own(k).schedule = {{0, 1, 1}};
             c.device = 5, c.twin = 0;
           }),
      make("narrow_replayed", [=](Case& c, Config& k) { narrow(c, k), c.replayed = true; }),
      make("nothing_to_search", [](Case& c, Config&) { c.tokens = 10; }),
      make("error", [=](Case& c, Config& k) { budget(c, k, 32, .1), c.steps = 6, c.twin = 0; }),
      make("error_that_few_rows_leave",
           [=](Case& c, Config& k) { budget(c, k, 32, .9), c.twin = 4; }),
      make("error_of_whole_keys_float32",
           [=](Case& c, Config& k) {
             budget(c, k, 16, .15), own(k).block = 0;
             k.dtype = kFloat, k.head_dim = 64;
           }),
      make("error_that_is_never_reached",
           [=](Case& c, Config& k) { budget(c, k, 16, 1e-6), k.dtype = kHalf; }),
      make("error_of_a_group_of_twenty",
           [=](Case& c, Config& k) {
             budget(c, k, 16, .36);
             k.query_heads = 20, k.kv_heads = 1;
             c.sink_bias = true, c.softcap = 20;
           }),
      make("error_of_more_rows_than_a_block_has_threads",
           [=](Case& c, Config& k) {
             budget(c, k, 32, .05), own(k).top_k = 900, c.tokens = 3000, c.steps = 2;
             own(k).min_candidates_per_row = 1, own(k).schedule = {{0, .5, .2}};
             c.device = 1, c.twin = 0;
           }),
      make("error_of_all_candidates",
           [=](Case& c, Config& k) {
             budget(c, k, 16, .08), own(k).top_k = 400, c.tokens = 1700;
             own(k).min_candidates_per_row = 1, own(k).schedule = {{0, .3, .2}};
           }),
      make("error_of_equal_keys",
           [=](Case& c, Config& k) {
             budget(c, k, 32, .12), c.equal_keys = true, own(k).top_k = 300, votes(k);
             own(k).block = 0, c.twin = 0;
           }),
      make("error_hostile", [=](Case& c, Config& k) { budget(c, k, 16, .1), c.hostile = true; }),
      make("error_replayed",
           [=](Case& c, Config& k) {
             budget(c, k, 32, .1), c.replayed = true, c.steps = 12, c.flush_after = 4;
             k.update = 8, k.local = 16, k.row_cache = 16;
           }),
      make("error_in_branches",
           [=](Case& c, Config& k) {
             budget(c, k, 16, .15), c.device = 4, c.twin = 2, c.batch = 3;
             c.tokens = 1200, c.steps = 2;
             k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64;
           }),
      make("error_of_fixed_rows", [=](Case& c, Config& k) { tail(c, k, 32), c.errors = true; }),
      make("error_that_is_not_asked_for",
           [=](Case& c, Config& k) { tail(c, k, 32), own(k).error = .1; }),
      make("error_of_sequences_that_are_not_searched",
           [=](Case& c, Config& k) {
             budget(c, k, 32, .1), c.batch = 4, c.tokens = 1400, k.dense_below = 1300;
           }),
      make("blocks_of_64", [=](Case& c, Config& k) { blocks(c, k, 64); }),
      make("blocks_of_256_without_queries",
           [](Case& c, Config& k) {
             own(k).block = 256, c.tokens = kOpened, c.device = 0, c.twin = 1;
           }),
      make("saved_blocks_and_tail",
           [=](Case& c, Config& k) {
             tail(c, k, 32), c.batch = 2, c.tokens = 1200, c.steps = 9, c.saved_after = 4;
             k.update = 8, k.local = 16, c.truncate_after = 2, c.truncate_by = 70;
           }),
      make("saved_votes_float32",
           [=](Case& c, Config& k) {
             votes(k), mean(k), k.dtype = kFloat, k.value_dim = 64;
             c.steps = 8, c.saved_after = 3, k.update = 6;
           }),
      make("saved_and_replayed",
           [=](Case& c, Config& k) {
             tail(c, k, 16), c.tokens = 1250, c.replayed = true, c.steps = 10, c.saved_after = 5,
                             k.update = 4;
             k.local = 16, k.segment_tokens = 64;
           }),
      make("saved_before_its_zone_opens",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.tokens = 1018, c.steps = 16, c.saved_after = 1, k.update = 4,
                               k.local = 4;
           }),
      make("blocks_float32_80_softcap_and_bias",
           [=](Case& c, Config& k) {
             blocks(c, k, 128), k.dtype = kFloat, k.head_dim = 80;
             c.softcap = 20, c.sink_bias = true, c.chunks = 5;
           }),
      make("blocks_float16_256_mean",
           [=](Case& c, Config& k) {
             blocks(c, k, 128), k.dtype = kHalf, k.head_dim = 256, mean(k);
           }),
      make("blocks_64_of_a_group_of_twenty",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), k.query_heads = 20, k.kv_heads = 1, k.head_dim = 64;
           }),
      make("blocks_of_a_group_of_one",
           [=](Case& c, Config& k) { blocks(c, k, 64), k.query_heads = 2, k.dtype = kHalf; }),
      make("blocks_512_in_odd_segments",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), k.segment_tokens = 192, k.head_dim = 512, c.tokens = 1500;
           }),
      make("blocks_in_chunks_of_sums",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.tokens = 9000, c.steps = 2, c.device = 5, k.sink = 70;
           }),
      make("blocks_replayed",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.replayed = true, c.steps = 20, c.flush_after = 5;
             c.truncate_after = 14, c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("blocks_in_branches",
           [=](Case& c, Config& k) {
             blocks(c, k, 64), c.device = 4, c.batch = 3, c.tokens = 1200, c.steps = 2;
             c.packed = true, k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64;
           }),
      make("blocks_hostile", [=](Case& c, Config& k) { blocks(c, k, 64), c.hostile = true; }),
      make("blocks_of_equal_keys",
           [=](Case& c, Config& k) { blocks(c, k, 128), c.equal_keys = true, own(k).top_k = 300; }),
      make("tail", [=](Case& c, Config& k) { tail(c, k, 32); }),
      make("tail_in_blocks_of_a_head",
           [=](Case& c, Config& k) { tail(c, k, 64), c.device = 0, c.twin = 5, c.tokens = 3000; }),
      make("tail_on_the_device",
           [=](Case& c, Config& k) {
             tail(c, k, 16), k.placement = Placement::kDevice, k.dtype = kHalf, c.softcap = 20;
           }),
      make("tail_replayed",
           [=](Case& c, Config& k) {
             tail(c, k, 32), c.replayed = true, c.steps = 20, c.flush_after = 5, c.tokens = 1500;
             c.truncate_after = 11, c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("tails_of_secret_seeds",
           [=](Case& c, Config& k) {
             tail(c, k, 32), own(k).seed.reset(), c.batch = 3, c.tokens = 1500, c.replayed = true;
             c.steps = 14, c.saved_after = 5, c.fork_after = 8, k.update = 8, k.local = 16;
           }),
      make("tail_of_a_group_of_twenty_256",
           [=](Case& c, Config& k) {
             tail(c, k, 64), k.query_heads = 20, k.kv_heads = 1, k.head_dim = 256;
             c.sink_bias = true;
           }),
      make("tail_float32_keys_64_values_192",
           [=](Case& c, Config& k) {
             tail(c, k, 32), k.dtype = kFloat, k.head_dim = 64, k.value_dim = 192, c.batch = 3;
           }),
      make("tail_hostile", [=](Case& c, Config& k) { tail(c, k, 32), c.hostile = true; }),
      make("tail_infinite", [=](Case& c, Config& k) { tail(c, k, 32), c.infinite = true; }),
      make("tail_infinite_float16_in_blocks_of_a_head",
           [=](Case& c, Config& k) {
             tail(c, k, 32), c.infinite = true, k.dtype = kHalf, c.device = 0, c.twin = 5;
             k.placement = Placement::kDevice;
           }),
      make("tail_infinite_float32",
           [=](Case& c, Config& k) { tail(c, k, 32), c.infinite = true, k.dtype = kFloat; }),
      make("tail_infinite_of_all_rows",
           [=](Case& c, Config& k) { tail(c, k, 512), c.infinite = true, own(k).error = .05; }),
      make("tail_infinite_of_a_group_of_five_256",
           [=](Case& c, Config& k) {
             tail(c, k, 32), c.infinite = true, k.query_heads = 10, k.head_dim = 256;
           }),
      make("infinite_votes_float16",
           [=](Case& c, Config& k) { c.infinite = true, k.dtype = kHalf, votes(k); }),
      make("tail_that_counts_for_nothing",
           [=](Case& c, Config& k) {
             tail(c, k, 32), own(k).top_k = 4096, own(k).schedule = {{0, 1, 1}};
           }),
      make("few_keys", [](Case& c, Config&) { c.tokens = 90; }),
      make("large_device", [](Case& c, Config&) { c.device = 0, c.twin = 1; }),
      make("steps_apart",
           [](Case& c, Config&) { c.device = 0, c.twin = 1, c.apart = true, c.tokens = 4500; }),
      make("very_many_processors", [](Case& c, Config&) { c.device = 3, c.twin = 4; }),
      make("three_processors", [](Case& c, Config&) { c.device = 5, c.twin = 2; }),
      make("little_shared_memory", [](Case& c, Config& k) { c.device = 6, k.head_dim = 256; }),
      make("long", [](Case& c, Config& k) { c.tokens = 9000, own(k).top_k = 2048; }),
      make("many_candidates",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 1, c.batch = 2, c.tokens = 9600, c.steps = 2;
             own(k).top_k = 2200;
           }),
      make("float32_64", [](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 64; }),
      make("float32_80_votes",
           [=](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 80, votes(k); }),
      make("float32_256_mean_softcap",
           [=](Case& c, Config& k) {
             k.dtype = kFloat, k.head_dim = 256, mean(k);
             c.softcap = 20, c.sink_bias = true;
           }),
      make("bfloat16_128_softcap_and_bias",
           [](Case& c, Config&) { c.softcap = 20, c.sink_bias = true; }),
      make("bfloat16_80_softcap_and_bias",
           [](Case& c, Config& k) { k.head_dim = 80, c.softcap = 15, c.sink_bias = true; }),
      make("float16_256_votes_softcap_and_bias",
           [=](Case& c, Config& k) {
             k.dtype = kHalf, k.head_dim = 256, votes(k);
             c.softcap = 20, c.sink_bias = true;
           }),
      // 2^33 elements in a segment: the last head's rows begin beyond 2^32 of them.
      make("elements_beyond_32_bits",
           [](Case& c, Config& k) {
             c.device_segment = int64_t{1} << 20;
             k.query_heads = k.kv_heads = 16, k.head_dim = 64, k.value_dim = 512;
             c.tokens = 300, c.steps = 2;
           }),
      make("most_rows",
           [](Case& c, Config& k) { c.tokens = 6000, c.steps = 2, own(k).top_k = 4096; }),
      make("float16_64_votes_mean",
           [=](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 64, votes(k), mean(k); }),
      make("float16_96", [](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 96; }),
      make("float16_128", [](Case&, Config& k) { k.dtype = kHalf; }),
      make("bfloat16_80", [](Case&, Config& k) { k.head_dim = 80; }),
      make("bfloat16_256_votes", [=](Case&, Config& k) { k.head_dim = 256, votes(k); }),
      make("bfloat16_192", [](Case&, Config& k) { k.head_dim = 192; }),
      make("float32_192_votes",
           [=](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 192, votes(k); }),
      make("bfloat16_512",
           [](Case& c, Config& k) { k.head_dim = 512, c.softcap = 20, c.sink_bias = true; }),
      make("float16_512_mean",
           [=](Case&, Config& k) { k.dtype = kHalf, k.head_dim = 512, mean(k); }),
      make("float32_512_little_shared_memory",
           [](Case& c, Config& k) { c.device = 6, k.dtype = kFloat, k.head_dim = 512; }),
      make("bfloat16_512_in_blocks_of_a_head",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 5, c.tokens = 3000, c.steps = 2, k.head_dim = 512;
           }),
      make("keys_192_values_128",
           [](Case& c, Config& k) { k.head_dim = 192, k.value_dim = 128, c.twin = 2; }),
      make("keys_64_values_512_row_cache_that_evicts",
           [](Case& c, Config& k) {
             k.dtype = kHalf, k.head_dim = 64, k.value_dim = 512, k.row_cache = 16, c.steps = 8;
           }),
      make("keys_512_values_64_float32",
           [](Case&, Config& k) { k.dtype = kFloat, k.head_dim = 512, k.value_dim = 64; }),
      make("keys_80_values_256_in_strides",
           [](Case& c, Config& k) {
             k.head_dim = 80, k.value_dim = 256, c.batch = 3, c.gap = 3, c.tokens = 700;
           }),
      make("keys_64_values_192_replayed_group_of_twenty",
           [](Case& c, Config& k) {
             k.query_heads = 20, k.kv_heads = 1, k.dtype = kFloat, k.head_dim = 64;
             k.value_dim = 192, c.replayed = true, c.steps = 5;
           }),
      make("group_of_one", [](Case&, Config& k) { k.query_heads = 2; }),
      make("group_of_five_votes", [=](Case&, Config& k) { k.query_heads = 10, votes(k); }),
      make("group_of_sixteen", [](Case&, Config& k) { k.query_heads = 32; }),
      make("group_of_twenty_float32",
           [](Case&, Config& k) { k.query_heads = 20, k.kv_heads = 1, k.dtype = kFloat; }),
      make("group_of_twenty_64",
           [](Case&, Config& k) { k.query_heads = 20, k.kv_heads = 1, k.head_dim = 64; }),
      make("no_row_cache", [](Case& c, Config& k) { k.row_cache = 0, c.steps = 5; }),
      make("row_cache_that_evicts", [](Case& c, Config& k) { k.row_cache = 16, c.steps = 12; }),
      make("rows_on_the_device", [](Case&, Config& k) { k.placement = Placement::kDevice; }),
      make("in_full", [](Case& c, Config& k) { k.dense_below = 5000, c.batch = 3, c.twin = 4; }),
      make("in_full_by_the_chain",
           [](Case& c, Config& k) { k.dense_below = 5000, c.batch = 3, c.device = 6; }),
      make("in_full_and_searched",
           [](Case& c, Config& k) {
             k.dense_below = 800, c.batch = 4, c.softcap = 20, c.sink_bias = true,
             c.replayed = true;
           }),
      make("in_full_and_searched_step_by_step",
           [](Case& c, Config& k) { k.dense_below = 800, c.batch = 7, c.steps = 3, c.gap = 2; }),
      make(
          "in_full_and_searched_beside_idle_slots",
          [](Case& c, Config& k) { k.dense_below = 800, c.batch = 5, c.idle = true, c.steps = 3; }),
      make("in_full_80_of_seven_heads_in_strides",
           [=](Case& c, Config& k) {
             k.dense_below = 5000, k.query_heads = 14, k.head_dim = 80, k.dtype = kHalf;
             k.segment_tokens = 64, c.gap = 3, c.tokens = 1300;
           }),
      make("in_full_of_six_heads",
           [=](Case&, Config& k) { k.dense_below = 5000, k.query_heads = 12, k.dtype = kHalf; }),
      make("in_full_of_twelve_heads",
           [=](Case& c, Config& k) {
             k.dense_below = 5000, k.query_heads = 24, k.head_dim = 128, k.dtype = kHalf;
             c.tokens = 1300, c.softcap = 20, c.sink_bias = true;
           }),
      make("in_full_256_of_float16",
           [=](Case&, Config& k) { k.dense_below = 5000, k.head_dim = 256, k.dtype = kHalf; }),
      make("batch_of_three", [](Case& c, Config&) { c.batch = 3, c.twin = 2; }),
      make("batch_in_one_call", [](Case& c, Config&) { c.batch = 6, c.packed = true; }),
      make("batch_with_strides_and_chunks",
           [=](Case& c, Config& k) {
             c.batch = 5, c.gap = 8, c.chunks = 3, c.tokens = 700;
             k.dtype = kHalf, votes(k);
           }),
      make("batch_with_gaps_of_eight",
           [](Case& c, Config&) { c.batch = 3, c.gap = 8, c.tokens = 700; }),
      make("batch_with_gaps_of_three",
           [](Case& c, Config&) { c.batch = 3, c.gap = 3, c.tokens = 700; }),
      make("batch_in_branches",
           [](Case& c, Config& k) {
             c.device = 0, c.twin = 4, c.batch = 3, c.tokens = 400, c.steps = 2;
             k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64;
           }),
      make("flush_and_truncate",
           [](Case& c, Config& k) {
             c.steps = 24, c.flush_after = 6, c.truncate_after = 10, c.truncate_by = 150;
             k.update = 8, k.local = 16;
           }),
      make("replayed",
           [](Case& c, Config& k) {
             c.replayed = true, c.steps = 20, c.flush_after = 5, c.truncate_after = 11;
             c.truncate_by = 150, k.update = 8, k.local = 16;
           }),
      make("idle_slots",
           [=](Case& c, Config& k) {
             c.idle = true, c.batch = 3, c.steps = 8, c.gap = 3, tail(c, k, 32);
           }),
      make("idle_slots_replayed",
           [](Case& c, Config& k) {
             c.idle = c.replayed = true, c.batch = 3, c.steps = 9, k.dense_below = 800;
             c.sink_bias = true;
           }),
      make("idle_slots_float32_replayed",
           [=](Case& c, Config& k) {
             budget(c, k, 32, .1), c.idle = c.replayed = true, c.batch = 2, c.steps = 7;
             k.dtype = kFloat;
           }),
      make("replayed_votes_in_branches",
           [=](Case& c, Config& k) {
             c.replayed = true, c.steps = 4, c.device = 4, c.batch = 3, c.tokens = 300, votes(k);
             k.query_heads = 12, k.kv_heads = 6, k.head_dim = 64, k.update = 8, k.local = 16;
           }),
      make("replayed_into_more_candidates",
           [](Case& c, Config& k) {
             c.replayed = true, c.steps = 24, c.tokens = 500, k.update = 8, k.local = 16;
             own(k).schedule = {{0, 0.1, 0.2}, {520, 0.5, 0.2}};
           }),
      make("equal_keys",
           [=](Case& c, Config& k) { c.equal_keys = true, own(k).top_k = 300, votes(k); }),
      make("hostile", [](Case& c, Config&) { c.hostile = true; }),
      make("hostile_votes", [=](Case& c, Config& k) { c.hostile = true, votes(k); }),
      // Resident rows take longer than the search, and what they sum up to decides what is
      // selected.
      make("many_resident_rows",
           [=](Case& c, Config& k) {
             k.query_heads = 32, k.kv_heads = 2, k.head_dim = 64, k.value_dim = 512;
             k.dtype = kHalf, k.local = 900, c.tokens = 1300, c.batch = 2, c.steps = 2;
           }),
      make("small_segments", [](Case&, Config& k) { k.segment_tokens = 64, k.sink = 0; }),
      make("odd_segments", [](Case& c, Config& k) { k.segment_tokens = 192, c.tokens = 2500; }),
      make("more_rows_than_a_block_lists",
           [](Case& c, Config& k) {
             c.device = 1, c.twin = 0, c.tokens = 6000, c.steps = 2, own(k).top_k = 2400;
           }),
      // With one head rows set out before all are known.
      make("early_rows_and_more_than_listed",
           [](Case& c, Config& k) {
             c.tokens = 9000, c.steps = 2, k.query_heads = 4, k.kv_heads = 1, own(k).top_k = 2300;
             own(k).min_candidates_per_row = 1, own(k).schedule = {{0, 0.4, 0.2}};
           }),
      make("early_rows_and_row_cache",
           [](Case& c, Config& k) {
             k.query_heads = 4, k.kv_heads = 1, k.row_cache = 16, c.steps = 12;
           }),
  };
}

}  // namespace

Case search_case(const char* name, const std::function<void(Case&, Config&)>& change) {
  Case c;
  c.name = name;
  c.config.query_heads = 8;
  c.config.kv_heads = 2;
  c.config.head_dim = 128;
  c.config.dtype = DType::kBFloat16;
  c.config.sink = 4;
  c.config.local = 64;
  c.config.update = 128;
  own(c.config).top_k = 20;
  own(c.config).block = 0;  // zones of blocks open with 1,024 tokens
  c.config.dense_below = 0;
  c.config.segment_tokens = 256;
  c.config.placement = Placement::kHost;
  own(c.config).schedule = {{0, 0.2, 0.25}};
  c.config.threads = 1;
  change(c, c.config);
  return c;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases = pariskv_cases(), attend = attend_cases();
  std::vector<Case> kept = kept_cases(), pages = page_cases();
  cases.insert(cases.end(), attend.begin(), attend.end());
  cases.insert(cases.end(), kept.begin(), kept.end());
  cases.insert(cases.end(), pages.begin(), pages.end());
  return cases;
}

}  // namespace pariskv::test
