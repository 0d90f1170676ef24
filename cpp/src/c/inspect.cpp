// Calls that look at a cache and leave it as it is.
#include <algorithm>

#include "c/handles.h"
#include "c/status.h"
#include "c/structs.h"
#include "c/tensors.h"

using namespace pariskv;
using namespace pariskv::c;

namespace {

/** An explanation as C sees it, and its arrays. */
struct Explained : pariskv_explanation {
  explicit Explained(Explanation explanation);
  Explained(const Explained&) = delete;
  Explained& operator=(const Explained&) = delete;

  const Explanation all;

 private:
  void show(const ParisKVExplanation& details);
  void show(const HardKVExplanation& details);
  void show(const PRKVExplanation& details);
};

template <typename Element>
const Element* array(const std::vector<Element>& elements) {
  return elements.empty() ? nullptr : elements.data();
}

Explained::Explained(Explanation explanation) : pariskv_explanation{}, all(std::move(explanation)) {
  size = sizeof(pariskv_explanation);
  kv_heads = all.kv_heads;
  query_heads = all.query_heads;
  zone_begin = all.zone_begin;
  zone_tokens = all.zone_tokens;
  selected = all.selected;
  searched = all.searched ? 1 : 0;
  positions = array(all.positions);
  worth = array(all.worth);
  exact = array(all.exact);
  kept_width = int64_t(all.kept.size()) / all.kv_heads;
  kept = array(all.kept);
  if (const auto* found = std::get_if<ParisKVExplanation>(&all.details)) show(*found);
  if (const auto* found = std::get_if<HardKVExplanation>(&all.details)) show(*found);
  if (const auto* found = std::get_if<PRKVExplanation>(&all.details)) show(*found);
}

void Explained::show(const ParisKVExplanation& details) {
  candidates = details.candidates;
  candidate_positions = array(details.candidate_positions);
  coarse = array(details.coarse);
  estimated = array(details.estimated);
  error = array(details.error);
  mass = array(details.mass);
}

void Explained::show(const HardKVExplanation& details) {
  held_width = int64_t(details.held.size()) / kv_heads;
  held = array(details.held);
}

void Explained::show(const PRKVExplanation& details) {
  static_rows = details.static_rows;
  first_page = details.first_page;
  zone_pages = int64_t(details.page_scores.size()) / kv_heads;
  page_scores = array(details.page_scores);
  pages_width = int64_t(details.pages.size()) / kv_heads;
  pages = array(details.pages);
}

/** Summaries as C sees them, and their arrays. */
struct Unpacked : pariskv_summaries {
  explicit Unpacked(Summaries summaries);
  Unpacked(const Unpacked&) = delete;
  Unpacked& operator=(const Unpacked&) = delete;

  const Summaries all;
};

Unpacked::Unpacked(Summaries summaries) : pariskv_summaries{}, all(std::move(summaries)) {
  size = sizeof(pariskv_summaries);
  kv_heads = all.kv_heads;
  tokens = all.tokens;
  zone_begin = all.zone_begin;
  rotated_dim = all.rotated_dim;
  subspaces = all.subspaces;
  signs = array(all.signs);
  magnitudes = array(all.magnitudes);
  weights = array(all.weights);
  norms = array(all.norms);
  block = all.block;
  blocks = all.blocks;
  channels = all.channels;
  means = array(all.means);
  balance = array(all.balance);
  page = all.page;
  pages = all.pages;
  middles = array(all.middles);
  distances = array(all.distances);
}

pariskv_stats stats_of(const Stats& stats) {
  pariskv_stats own{};
  own.memory_live = stats.memory.live;
  own.memory_peak = stats.memory.peak;
  own.memory_reserved = stats.memory.reserved;
  own.memory_budget = stats.memory.budget;
  own.host_live = stats.host_memory.live;
  own.host_peak = stats.host_memory.peak;
  own.host_reserved = stats.host_memory.reserved;
  own.host_budget = stats.host_memory.budget;
  own.sequences = stats.sequences;
  own.tokens = stats.tokens;
  own.row_bytes = stats.row_bytes;
  own.offloaded_bytes = stats.offloaded_bytes;
  own.summary_bytes = stats.summary_bytes;
  own.workspace_bytes = stats.workspace_bytes;
  own.flushes = stats.flushes;
  own.encoded_keys = stats.encoded_keys;
  own.kept_rows = stats.kept_rows;
  own.kept_bytes = stats.kept_bytes;
  own.keeps = stats.keeps;
  own.dropped_rows = stats.dropped_rows;
  own.unusable_keys = stats.unusable_keys;
  own.decode_tokens = stats.decode_tokens;
  own.searched_tokens = stats.searched_tokens;
  own.candidates = stats.candidates;
  own.fetched_rows = stats.fetched_rows;
  own.cached_rows = stats.cached_rows;
  own.mean_error = stats.mean_error;
  own.worst_error = stats.worst_error;
  own.mean_mass = stats.mean_mass;
  own.least_mass = stats.least_mass;
  return own;
}

}  // namespace

pariskv_status pariskv_cache_explain(const pariskv_cache* cache, int64_t layer,
                                     pariskv_sequence sequence, const pariskv_tensor* q,
                                     const pariskv_attend_options* options, void* stream,
                                     const pariskv_explanation** explanation) {
  return answer([&] {
    const Cache& found = cache_of("explain", cache);
    check_result("explain", "explanation", explanation);
    *explanation = new Explained(found.explain(layer, sequence, view_of("explain", "q", q),
                                               options_of("explain", 1, options), Stream{stream}));
  });
}

void pariskv_explanation_destroy(const pariskv_explanation* explanation) {
  delete static_cast<const Explained*>(explanation);
}

pariskv_status pariskv_cache_summaries(const pariskv_cache* cache, int64_t layer,
                                       pariskv_sequence sequence,
                                       const pariskv_summaries** summaries) {
  return answer([&] {
    const Cache& found = cache_of("summaries", cache);
    check_result("summaries", "summaries", summaries);
    *summaries = new Unpacked(found.summaries(layer, sequence));
  });
}

void pariskv_summaries_destroy(const pariskv_summaries* summaries) {
  delete static_cast<const Unpacked*>(summaries);
}

pariskv_status pariskv_cache_read(const pariskv_cache* cache, int64_t layer,
                                  pariskv_sequence sequence, int64_t begin, const pariskv_tensor* k,
                                  const pariskv_tensor* v, void* stream) {
  return answer([&] {
    cache_of("read", cache)
        .read(layer, sequence, begin, view_of("read", "k", k), view_of("read", "v", v),
              Stream{stream});
  });
}

pariskv_status pariskv_cache_length(const pariskv_cache* cache, pariskv_sequence sequence,
                                    int64_t layer, int64_t* tokens) {
  return answer([&] {
    const Cache& found = cache_of("length", cache);
    check_result("length", "tokens", tokens);
    *tokens = found.length(sequence, layer);
  });
}

pariskv_status pariskv_cache_regions(const pariskv_cache* cache, pariskv_sequence sequence,
                                     int64_t layer, pariskv_region_counts* counts) {
  return answer([&] {
    const Cache& found = cache_of("regions", cache);
    check_place("[regions] counts", counts);
    const RegionCounts now = found.regions(sequence, layer);
    hand_out(counts,
             pariskv_region_counts{0, now.sink, now.retrieval, now.local, now.buffer, now.dropped});
  });
}

pariskv_status pariskv_cache_sequences(const pariskv_cache* cache, pariskv_sequence* sequences,
                                       int64_t capacity, int64_t* count) {
  return answer([&] {
    const Cache& found = cache_of("sequences", cache);
    check_result("sequences", "count", count);
    if (capacity < 0) fail("[sequences] capacity: expected 0 or more, got ", capacity);
    if (sequences == nullptr && capacity > 0) {
      fail("[sequences] sequences: expected room for ", capacity, " of them, got a null pointer");
    }
    const std::vector<SequenceId> all = found.sequences();
    *count = int64_t(all.size());
    std::copy_n(all.begin(), std::min(*count, capacity), sequences);
  });
}

pariskv_status pariskv_cache_pages(const pariskv_cache* cache, pariskv_pages* pages) {
  return answer([&] {
    const Cache& found = cache_of("pages", cache);
    check_place("[pages] pages", pages);
    const Pages own = found.pages();
    pariskv_pages told{};
    told.keys = tensor_of(own.keys()), told.values = tensor_of(own.values());
    hand_out(pages, told);
  });
}

pariskv_status pariskv_cache_page_table(pariskv_cache* cache, int64_t sequences, int64_t tokens,
                                        pariskv_page_table* table, void* stream) {
  return answer([&] {
    Cache& found = cache_of("page_table", cache);
    check_place("[page_table] table", table);
    const PageTable own = found.page_table(sequences, tokens, Stream{stream});
    pariskv_page_table told{};
    told.pages = own.pages, told.lengths = own.lengths;
    told.rows = own.rows, told.width = own.width;
    hand_out(table, told);
  });
}

pariskv_status pariskv_cache_stats(const pariskv_cache* cache, pariskv_stats* stats) {
  return answer([&] {
    const Cache& found = cache_of("stats", cache);
    check_place("[stats] stats", stats);
    hand_out(stats, stats_of(found.stats()));
  });
}
