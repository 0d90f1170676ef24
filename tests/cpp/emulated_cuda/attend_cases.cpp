// Cases of many tokens at once, enough for a warpgroup on 9.0: in both precisions.
#include "cases.h"

namespace pariskv::test {

namespace {

Case make(const char* name, const std::function<void(Case&, Config&)>& change) {
  return search_case(name, [&](Case& c, Config& config) {
    c.attended = 70, c.steps = 1, c.fast = true;
    change(c, config);
  });
}

}  // namespace

std::vector<Case> attend_cases() {
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kFloat16;
  return {
      make("many_attend", [](Case&, Config&) {}),
      make("many_attend_float16_64",
           [](Case& c, Config& k) {
             c.attended = 90, c.batch = 2, c.gap = 8;
             k.dtype = kHalf, k.head_dim = 64, k.segment_tokens = 64;
           }),
      make("many_attend_hostile",
           [](Case& c, Config&) { c.hostile = true, c.softcap = 20, c.sink_bias = true; }),
      make("many_attend_infinite", [](Case& c, Config&) { c.infinite = true; }),
      make("many_attend_infinite_float16_64",
           [](Case& c, Config& k) {
             c.attended = 90, c.infinite = true, k.dtype = kHalf, k.head_dim = 64;
           }),
      make("many_attend_beyond_the_prompt",
           [](Case& c, Config&) { c.attended = 140, c.tokens = 130; }),
      // Of 128 rows that are weighed together some lie in another segment, or not at all.
      make("many_attend_segments_of_192",
           [](Case& c, Config& k) { c.tokens = 1100, k.segment_tokens = 192; }),
      make("many_attend_float32", [](Case&, Config& k) { k.dtype = kFloat; }),
      make("many_attend_80", [](Case&, Config& k) { k.head_dim = 80; }),
      // A launch has fewer blocks than there are queries for, beside copies.
      make("many_attend_on_three_processors",
           [](Case& c, Config&) { c.attended = 100, c.tokens = 900, c.device = 5, c.twin = 2; }),
  };
}

}  // namespace pariskv::test
