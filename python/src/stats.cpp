// Stats, regions, explanations and summaries: numbers, and NumPy arrays over the C++ vectors.
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "arrays.h"
#include "fields.h"
#include "module.h"

namespace pariskv::python {

namespace {

template <typename T>
using Matrix = nb::ndarray<nb::numpy, const T, nb::ndim<2>, nb::c_contig>;

/** A read-only NumPy view of a vector that `owner`, a Python object, holds. */
template <typename T>
Matrix<T> matrix(nb::handle owner, const std::vector<T>& values, int64_t rows) {
  const size_t columns = rows == 0 ? 0 : values.size() / size_t(rows);
  return Matrix<T>(values.data(), {size_t(rows), columns}, owner);
}

template <typename T>
using Cube = nb::ndarray<nb::numpy, const T, nb::ndim<3>, nb::c_contig>;

template <typename Owner, auto Member, auto Rows>
auto matrix_of(nb::handle_t<Owner> self) {
  const Owner& owner = nb::cast<const Owner&>(self);
  return matrix(self, owner.*Member, owner.*Rows);
}

template <typename Owner, auto Member>
auto vector_of(nb::handle_t<Owner> self) {
  const auto& values = nb::cast<const Owner&>(self).*Member;
  using T = typename std::decay_t<decltype(values)>::value_type;
  return nb::ndarray<nb::numpy, const T, nb::ndim<1>, nb::c_contig>(values.data(), {values.size()},
                                                                    self);
}

template <auto Member, auto Columns>
auto cube_of(nb::handle_t<Summaries> self) {
  const Summaries& summaries = nb::cast<const Summaries&>(self);
  const auto& values = summaries.*Member;
  using T = typename std::decay_t<decltype(values)>::value_type;
  return Cube<T>(values.data(),
                 {size_t(summaries.kv_heads), size_t(summaries.tokens), size_t(summaries.*Columns)},
                 self);
}

/** (kv_heads, blocks or pages, channels), as long as there are any. */
template <auto Member, auto Count>
auto channels_of(nb::handle_t<Summaries> self) {
  const Summaries& s = nb::cast<const Summaries&>(self);
  return Cube<float>((s.*Member).data(), {size_t(s.kv_heads), size_t(s.*Count), size_t(s.channels)},
                     self);
}

/** Text of what an array shows: how many rows or numbers a kv head has. */
int64_t width_of(size_t numbers, int64_t heads) {
  return heads == 0 ? 0 : int64_t(numbers) / heads;
}

std::string text_of(const ParisKVExplanation& e) {
  nb::dict fields;
  fields["scored"] = width_of(e.coarse.size(), e.kv_heads);
  fields["candidates"] = width_of(e.candidate_positions.size(), e.kv_heads);
  return text_of_fields("ParisKVExplanation", fields);
}

std::string text_of(const HardKVExplanation& e) {
  nb::dict fields;
  fields["held"] = width_of(e.held.size(), e.kv_heads);
  return text_of_fields("HardKVExplanation", fields);
}

std::string text_of(const PRKVExplanation& e) {
  nb::dict fields;
  fields["static_rows"] = e.static_rows;
  fields["pages"] = width_of(e.pages.size(), e.kv_heads);
  return text_of_fields("PRKVExplanation", fields);
}

/** Where the query attends, in numbers per kv head. */
std::string text_of(const Explanation& e) {
  nb::dict fields;
  fields["searched"] = e.searched;
  fields["zone"] = nb::make_tuple(e.zone_begin, e.zone_begin + e.zone_tokens);
  fields["selected"] = width_of(e.positions.size(), e.kv_heads);
  fields["kept"] = width_of(e.kept.size(), e.kv_heads);
  fields["kv_heads"] = e.kv_heads;
  fields["details"] = nb::cast(e.details);
  return text_of_fields("Explanation", fields);
}

std::string text_of(const Summaries& s) {
  nb::dict fields;
  fields["zone"] = nb::make_tuple(s.zone_begin, s.zone_begin + s.tokens);
  fields["kv_heads"] = s.kv_heads;
  fields["block"] = s.block;
  fields["page"] = s.page;
  return text_of_fields("Summaries", fields);
}

void bind_counts(nb::module_& m) {
  nb::class_<MemoryUse>(m, "MemoryUse", "A cache's memory, in bytes.")
      .def_ro("live", &MemoryUse::live, "Handed out and not given back.")
      .def_ro("peak", &MemoryUse::peak, "The most that was ever live.")
      .def_ro("reserved", &MemoryUse::reserved, "Held from the system.")
      .def_ro("budget", &MemoryUse::budget, "The most that may be reserved; 0 is no limit.")
      .def_ro("coming", &MemoryUse::coming, "Of reserved: not there yet, a thread is taking it.")
      .def("__repr__", [](const MemoryUse& use) {
        nb::dict fields;
        fields["live"] = use.live;
        fields["peak"] = use.peak;
        fields["reserved"] = use.reserved;
        fields["budget"] = use.budget;
        fields["coming"] = use.coming;
        return text_of_fields("MemoryUse", fields);
      });

  nb::class_<RegionCounts>(m, "Regions", "Tokens of one layer of one sequence, by region.")
      .def_ro("sink", &RegionCounts::sink)
      .def_ro("retrieval", &RegionCounts::retrieval)
      .def_ro("local", &RegionCounts::local)
      .def_ro("buffer", &RegionCounts::buffer)
      .def_ro("dropped", &RegionCounts::dropped,
              "Of retrieval: rows that were given back, see HardKV(placement=\"dropped\").")
      .def("__repr__", [](const RegionCounts& counts) {
        nb::dict fields;
        fields["sink"] = counts.sink;
        fields["retrieval"] = counts.retrieval;
        fields["local"] = counts.local;
        fields["buffer"] = counts.buffer;
        if (counts.dropped > 0) fields["dropped"] = counts.dropped;
        return text_of_fields("Regions", fields);
      });

  nb::class_<Stats>(m, "Stats", "What a cache holds, and has done since it was made.")
      .def_ro("memory", &Stats::memory, "Of the cache's device.")
      .def_ro("host_memory", &Stats::host_memory, "Pinned host memory of a cache on a GPU.")
      .def_ro("sequences", &Stats::sequences)
      .def_ro("tokens", &Stats::tokens, "Over all layers and sequences.")
      .def_ro("row_bytes", &Stats::row_bytes, "K and V, in whole row blocks.")
      .def_ro("offloaded_bytes", &Stats::offloaded_bytes, "Of those, in host memory.")
      .def_ro("summary_bytes", &Stats::summary_bytes, "Key summaries and their statistics.")
      .def_ro("workspace_bytes", &Stats::workspace_bytes)
      .def_ro("flushes", &Stats::flushes)
      .def_ro("encoded_keys", &Stats::encoded_keys, "Keys summarised, over kv heads.")
      .def_ro("kept_rows", &Stats::kept_rows, "Kept for steps to come, over kv heads.")
      .def_ro("kept_bytes", &Stats::kept_bytes,
              "Copies of those, and the queries that are remembered.")
      .def_ro("keeps", &Stats::keeps, "Times that rows were chosen to be kept, per layer.")
      .def_ro("dropped_rows", &Stats::dropped_rows,
              "Of the retrieval zones, given back: over kv heads.")
      .def_ro("unusable_keys", &Stats::unusable_keys,
              "Keys of the retrieval zones that are never selected, over kv heads: not finite, or "
              "(ParisKV without blocks) zero. HardKV does not count them: 0.")
      .def_ro("decode_tokens", &Stats::decode_tokens, "Per layer.")
      .def_ro("searched_tokens", &Stats::searched_tokens, "Of those, the ones that searched.")
      .def_ro("candidates", &Stats::candidates, "Reranked, over kv heads.")
      .def_ro("fetched_rows", &Stats::fetched_rows, "Selected, over kv heads.")
      .def_ro("cached_rows", &Stats::cached_rows, "Of those, found in the row cache of a GPU.")
      .def_ro("mean_error", &Stats::mean_error,
              "Error that was predicted, see Cache.decode: its mean over tokens, layers and kv "
              "heads. With ParisKV(error=...), and of steps with return_error; else NaN.")
      .def_ro("worst_error", &Stats::worst_error, "The worst of these.")
      .def_ro("mean_mass", &Stats::mean_mass,
              "Share of the attention of the rows attended to exactly, as searches estimated it: "
              "the mean over those whose error was predicted; else NaN.")
      .def_ro("least_mass", &Stats::least_mass, "The least of these.")
      .def("__repr__", [](const Stats& stats) {
        nb::dict fields;
        fields["sequences"] = stats.sequences;
        fields["tokens"] = stats.tokens;
        fields["live"] = stats.memory.live;
        fields["row_bytes"] = stats.row_bytes;
        fields["offloaded_bytes"] = stats.offloaded_bytes;
        fields["summary_bytes"] = stats.summary_bytes;
        fields["workspace_bytes"] = stats.workspace_bytes;
        fields["flushes"] = stats.flushes;
        fields["kept_rows"] = stats.kept_rows;
        fields["kept_bytes"] = stats.kept_bytes;
        fields["keeps"] = stats.keeps;
        fields["dropped_rows"] = stats.dropped_rows;
        fields["unusable_keys"] = stats.unusable_keys;
        fields["decode_tokens"] = stats.decode_tokens;
        fields["searched_tokens"] = stats.searched_tokens;
        fields["candidates"] = stats.candidates;
        fields["fetched_rows"] = stats.fetched_rows;
        fields["cached_rows"] = stats.cached_rows;
        fields["mean_error"] = stats.mean_error;
        fields["worst_error"] = stats.worst_error;
        fields["mean_mass"] = stats.mean_mass;
        fields["least_mass"] = stats.least_mass;
        return text_of_fields("Stats", fields);
      });
}

}  // namespace

void bind_stats(nb::module_& m) {
  bind_counts(m);

  using P = ParisKVExplanation;
  nb::class_<P>(m, "ParisKVExplanation", "The path of a search by ParisKV.")
      .def("__repr__", [](const P& self) { return text_of(self); })
      .def_prop_ro("coarse", &matrix_of<P, &P::coarse, &P::kv_heads>,
                   "(kv_heads, zone_tokens) uint8: coarse scores; 0 is never selected.")
      .def_prop_ro("candidate_positions", &matrix_of<P, &P::candidate_positions, &P::kv_heads>,
                   "(kv_heads, candidates) int64, ascending; padded with -1.")
      .def_prop_ro("estimated", &matrix_of<P, &P::estimated, &P::query_heads>,
                   "(query_heads, selected) float32: logits from the summaries.")
      .def_prop_ro("error", &vector_of<P, &P::error>,
                   "(kv_heads) float32: the error that is predicted, as decode(return_error=True) "
                   "returns it; NaN where no query is finite. Empty without a sample, and with "
                   "mean_query.")
      .def_prop_ro("mass", &vector_of<P, &P::mass>,
                   "(kv_heads) float32: the share of the attention of the rows attended to "
                   "exactly, as estimated; NaN and empty as error.");

  using H = HardKVExplanation;
  nb::class_<H>(m, "HardKVExplanation", "What HardKV has besides the rows that it keeps.")
      .def("__repr__", [](const H& self) { return text_of(self); })
      .def_prop_ro("held", &matrix_of<H, &H::held, &H::kv_heads>,
                   "(kv_heads, width) int64 positions, ascending: not attended to, but they may "
                   "come back; padded with -1.");

  using R = PRKVExplanation;
  nb::class_<R>(m, "PRKVExplanation", R"(What PRKV found for a query. Pages have numbers: that of a
position is position // page.)")
      .def("__repr__", [](const R& self) { return text_of(self); })
      .def_ro("static_rows", &R::static_rows, "Rows that the budget has to be kept.")
      .def_ro("first_page", &R::first_page, "Of the zone.")
      .def_prop_ro("page_scores", &matrix_of<R, &R::page_scores, &R::kv_heads>,
                   "(kv_heads, pages of the zone) float32: mean of the group's heads; -inf is a "
                   "page all of whose rows are kept.")
      .def_prop_ro("pages", &matrix_of<R, &R::pages, &R::kv_heads>,
                   "(kv_heads, width) int64, best first; padded with -1.");

  using E = Explanation;
  nb::class_<E>(m, "Explanation", R"(Why a query attends where it does; arrays are padded to one
width, positions with -1 and numbers with NaN. They are empty when nothing was searched, `kept` when
nothing was kept; with both empty the whole zone is attended to.)")
      .def("__repr__", [](const E& self) { return text_of(self); })
      .def_ro("searched", &E::searched, "False: nothing was selected for this query.")
      .def_ro("zone_begin", &E::zone_begin, "First position of the retrieval zone.")
      .def_ro("zone_tokens", &E::zone_tokens)
      .def_prop_ro("positions", &matrix_of<E, &E::positions, &E::kv_heads>,
                   "(kv_heads, selected) int64, best first.")
      .def_prop_ro("worth", &matrix_of<E, &E::worth, &E::kv_heads>,
                   "(kv_heads, selected) float32: the order is by this.")
      .def_prop_ro("exact", &matrix_of<E, &E::exact, &E::query_heads>,
                   "(query_heads, selected) float32: logits from the rows.")
      .def_prop_ro("kept", &matrix_of<E, &E::kept, &E::kv_heads>,
                   "(kv_heads, width) int64 positions, ascending: rows that HardKV or PRKV keeps.")
      .def_ro("details", &E::details,
              "How the policy came to these rows; None when all of the zone is attended to.")
      .def(
          "plot",
          [](nb::handle self, nb::handle axes) {
            return nb::module_::import_("pariskv_core._plot").attr("plot")(self, axes);
          },
          nb::arg("axes").none() = nb::none(),
          nb::sig("def plot(self, axes: typing.Any = None) -> typing.Any"),
          R"(Where the step looked, by matplotlib: a line for each kv head over all positions, a mark
for each row, larger the more it is worth.

axes
    Of matplotlib, to draw there; a new figure's otherwise.

Returns the axes. Raises ImportError, with what to install, where matplotlib is missing.)");

  using S = Summaries;
  nb::class_<S>(m, "Summaries", R"(The key summaries of one layer of one sequence, unpacked.

With blocks, signs, magnitudes, weights and norms are those of key / balance - mean, the mean being
that of the key's block.)")
      .def("__repr__", [](const S& self) { return text_of(self); })
      .def_ro("zone_begin", &S::zone_begin, "Position of the first one.")
      .def_prop_ro("signs", &cube_of<&S::signs, &S::subspaces>,
                   "(kv_heads, tokens, subspaces) uint8: bit j is rotated dim 8b+j >= 0.")
      .def_prop_ro("magnitudes", &cube_of<&S::magnitudes, &S::rotated_dim>,
                   "(kv_heads, tokens, rotated_dim) uint8: level 0 to 7.")
      .def_prop_ro("weights", &cube_of<&S::weights, &S::subspaces>,
                   "(kv_heads, tokens, subspaces) float32: norm r_b / alpha_b, as it is used.")
      .def_prop_ro("norms", &matrix_of<S, &S::norms, &S::kv_heads>,
                   "(kv_heads, tokens) float32, to 5 bits; 0 is a key that is never selected.")
      .def_ro("block", &S::block, "Keys that share a mean; 0: none do.")
      .def_prop_ro(
          "means", &channels_of<&S::means, &S::blocks>,
          "(kv_heads, blocks, head_dim) float32: of keys / balance, one for each block that the "
          "zone "
          "has keys of; the key at a position has number position // block - zone_begin // block. "
          "Empty without blocks.")
      .def_prop_ro(
          "balance", &matrix_of<S, &S::balance, &S::kv_heads>,
          "(kv_heads, head_dim) float32: queries are multiplied by it, keys divided. Empty "
          "without blocks.")
      .def_ro("page", &S::page, "Keys that share a digest, of PRKV; 0: none do.")
      .def_prop_ro("middles", &channels_of<&S::middles, &S::pages>,
                   "(kv_heads, pages, head_dim) float32: the middle of each page's keys; NaN where "
                   "none is finite. Page p is number p + zone_begin // page. Empty without pages.")
      .def_prop_ro("distances", &channels_of<&S::distances, &S::pages>,
                   "(kv_heads, pages, head_dim) float32: how far they are from it, see PRKV.");
}

}  // namespace pariskv::python
