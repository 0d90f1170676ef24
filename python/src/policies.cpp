// The policies, each from keywords.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <variant>

#include "fields.h"
#include "module.h"
#include "pariskv/pariskv.h"

namespace pariskv::python {

namespace nb = nanobind;

namespace {

using Step = std::tuple<int64_t, double, double>;

Scorer parse_scorer(const std::string& name) {
  if (name == "sign_norm") return Scorer::kSignNorm;
  if (name == "votes") return Scorer::kVotes;
  throw nb::value_error(
      ("[config] policy.scorer: expected \"sign_norm\" or \"votes\", got \"" + name + "\"")
          .c_str());
}

const char* text(Scorer scorer) { return scorer == Scorer::kVotes ? "votes" : "sign_norm"; }

GroupRule parse_group_rule(const std::string& name) {
  if (name == "attention_mass") return GroupRule::kAttentionMass;
  if (name == "mean_query") return GroupRule::kMeanQuery;
  throw nb::value_error(
      ("[config] policy.group_rule: expected \"attention_mass\" or \"mean_query\", got \"" + name +
       "\"")
          .c_str());
}

const char* text(GroupRule rule) {
  return rule == GroupRule::kMeanQuery ? "mean_query" : "attention_mass";
}

TailRule parse_tail(const std::string& name) {
  if (name == "own") return TailRule::kOwn;
  if (name == "none") return TailRule::kNone;
  if (name == "sample") return TailRule::kSample;
  throw nb::value_error(
      ("[config] policy.tail: expected \"sample\", \"none\" or \"own\", got \"" + name + "\"")
          .c_str());
}

const char* text(TailRule rule) {
  return rule == TailRule::kOwn ? "own" : rule == TailRule::kNone ? "none" : "sample";
}

/** Those that hold: the policy's own where none are set. */
std::vector<Step> steps_of(const ParisKv& given) {
  const ParisKv settings = given.resolved();
  std::vector<Step> steps;
  for (const ScheduleStep& step : settings.schedule) {
    steps.emplace_back(step.from_tokens, step.candidate_ratio, step.vote_ratio);
  }
  return steps;
}

nb::dict fields_of(const ParisKv& s) {
  nb::dict fields;
  fields["top_k"] = s.top_k;
  fields["scorer"] = text(s.scorer);
  fields["group_rule"] = text(s.group_rule);
  fields["schedule"] = s.schedule.empty() ? nb::object(nb::none()) : nb::cast(steps_of(s));
  fields["min_candidates_per_row"] = s.min_candidates_per_row;
  fields["seed"] = s.seed;
  fields["block"] = s.block;
  fields["tail"] = text(s.tail);
  fields["tail_rows"] = s.tail_rows;
  fields["mass"] = s.mass;
  return fields;
}

constexpr const char* kParisKvDoc =
    R"(Every key is scored from a summary of a few bytes, a few percent are reranked, and the
best rows are fetched for each query.

top_k
    Rows attended to per kv head besides the resident ones.
scorer
    "sign_norm", or the paper's "votes".
group_rule
    "attention_mass", or the paper's "mean_query".
schedule
    Steps (from_tokens, candidate_ratio, vote_ratio), by tokens in the retrieval zone. None: the
    default of such keys, with blocks or whole; it can be read back.
min_candidates_per_row
    Candidates are never fewer than this times top_k.
seed
    Of the rotation's signs.
block
    Neighbouring keys that share a mean: 64, 128 or 256. Summaries then hold what is left of a
    key without it, with the channels of keys and queries balanced; prefill(q=) helps with
    that. 0: whole keys, as published; so it is with votes.
tail
    What becomes of keys that are not selected. "sample" estimates their part of the attention
    from evenly spaced rows, each with the weight of the keys around it; "none" leaves it out.
    "own": sample where there are blocks.
tail_rows
    Rows that are sampled per kv head: as many to twice as many.
mass
    A share of the attention, above 0 and at most 1. Rows are taken, best first, until those that
    are attended to exactly (the resident ones among them) have it, as the search estimates it;
    never more than top_k. Cache.stats() then has the share that was reached, mean and least; with
    1 rows are as without a budget, and this is all it does. None: no budget.

Raises ValueError, with what was expected and what came.)";

void bind_pariskv(nb::module_& m) {
  const ParisKv defaults;
  nb::class_<ParisKv> pariskv(m, "ParisKV", kParisKvDoc);
  const nb::object maker = nb::cpp_function(
      [](int64_t top_k, const std::string& scorer, const std::string& group_rule,
         const std::optional<std::vector<Step>>& schedule, int64_t min_candidates_per_row,
         uint64_t seed, int64_t block, const std::string& tail, int64_t tail_rows,
         std::optional<double> mass) {
        ParisKv settings;
        settings.top_k = top_k;
        settings.scorer = parse_scorer(scorer);
        settings.group_rule = parse_group_rule(group_rule);
        if (schedule && schedule->empty()) {
          throw nb::value_error(
              "[config] policy.schedule: expected at least one step, or None, got none");
        }
        for (const auto& [from_tokens, candidate_ratio, vote_ratio] :
             schedule.value_or(std::vector<Step>{})) {
          settings.schedule.push_back({from_tokens, candidate_ratio, vote_ratio});
        }
        settings.min_candidates_per_row = min_candidates_per_row;
        settings.seed = seed;
        settings.block = block;
        settings.tail = parse_tail(tail);
        settings.tail_rows = tail_rows;
        settings.mass = mass;
        settings.validate();
        return settings;
      },
      nb::kw_only(), nb::arg("top_k") = defaults.top_k, nb::arg("scorer") = text(defaults.scorer),
      nb::arg("group_rule") = text(defaults.group_rule), nb::arg("schedule") = nb::none(),
      nb::arg("min_candidates_per_row") = defaults.min_candidates_per_row,
      nb::arg("seed") = defaults.seed, nb::arg("block") = defaults.block,
      nb::arg("tail") = text(defaults.tail), nb::arg("tail_rows") = defaults.tail_rows,
      nb::arg("mass") = defaults.mass);
  pariskv.def_ro("top_k", &ParisKv::top_k)
      .def_prop_ro("scorer", [](const ParisKv& s) { return text(s.scorer); })
      .def_prop_ro("group_rule", [](const ParisKv& s) { return text(s.group_rule); })
      .def_prop_ro("schedule", &steps_of)
      .def_ro("min_candidates_per_row", &ParisKv::min_candidates_per_row)
      .def_ro("seed", &ParisKv::seed)
      .def_ro("block", &ParisKv::block)
      .def_prop_ro("tail", [](const ParisKv& s) { return text(s.tail); })
      .def_ro("tail_rows", &ParisKv::tail_rows)
      .def_ro("mass", &ParisKv::mass);
  bind_value(pariskv, "ParisKV", fields_of, maker,
             {"[config] policy.",
              {},
              {},
              {{"schedule", Either::kListOrNone}, {"mass", Either::kNumberOrNone}}});
}

KeepMetric parse_metric(const std::string& name) {
  if (name == "attention") return KeepMetric::kAttention;
  if (name == "snapkv") return KeepMetric::kSnapKv;
  throw nb::value_error(
      ("[config] policy.metric: expected \"attention\" or \"snapkv\", got \"" + name + "\"")
          .c_str());
}

const char* text(KeepMetric metric) {
  return metric == KeepMetric::kSnapKv ? "snapkv" : "attention";
}

nb::dict fields_of(const HardKv& s) {
  nb::dict fields;
  fields["most"] = s.most;
  fields["p"] = s.p;
  fields["least"] = s.least;
  fields["metric"] = text(s.metric);
  fields["pool"] = s.pool;
  fields["patience"] = s.patience;
  return fields;
}

constexpr const char* kHardKvDoc =
    R"(Nothing is searched for. Each time that tokens enter a retrieval zone, the last 32 queries
say how much attention its rows get, and each kv head keeps as many as it needs for a share p of
that; decode attends to these until the next time. For long answers.

All rows stay stored: truncate, fork, read and attend are exact. Until there were queries to choose
by, decode attends to the zone in full: a prompt brings its own by prefill(q=).

most
    Rows that a kv head keeps of the zone, at most.
p
    Share of the attention to the zone that the kept rows get, above 0 and at most 1. With 1 every
    head keeps `most` rows: a SnapKV that is refreshed.
least
    Rows that a kv head keeps at least.
metric
    What rows are ranked by: "attention", or "snapkv", the attention of the best of a row's
    neighbours. How many are kept is said by the attention itself, whatever the metric.
pool
    Neighbours that "snapkv" looks at, the row among them: odd.
patience
    Choices that a row may lose and still be held: it is not attended to, but may come back.

Raises ValueError, with what was expected and what came.)";

void bind_hardkv(nb::module_& m) {
  const HardKv defaults;
  nb::class_<HardKv> hardkv(m, "HardKV", kHardKvDoc);
  const nb::object maker = nb::cpp_function(
      [](int64_t most, double p, int64_t least, const std::string& metric, int64_t pool,
         int64_t patience) {
        HardKv settings;
        settings.most = most;
        settings.p = p;
        settings.least = least;
        settings.metric = parse_metric(metric);
        settings.pool = pool;
        settings.patience = patience;
        settings.validate();
        return settings;
      },
      nb::kw_only(), nb::arg("most") = defaults.most, nb::arg("p") = defaults.p,
      nb::arg("least") = defaults.least, nb::arg("metric") = text(defaults.metric),
      nb::arg("pool") = defaults.pool, nb::arg("patience") = defaults.patience);
  hardkv.def_ro("most", &HardKv::most)
      .def_ro("p", &HardKv::p)
      .def_ro("least", &HardKv::least)
      .def_prop_ro("metric", [](const HardKv& s) { return text(s.metric); })
      .def_ro("pool", &HardKv::pool)
      .def_ro("patience", &HardKv::patience);
  bind_value(hardkv, "HardKV", fields_of, maker, {"[config] policy.", {}, {}});
}

using Share = std::variant<double, std::string>;

std::optional<double> parse_share(const Share& share) {
  if (const double* number = std::get_if<double>(&share)) return *number;
  const auto& name = std::get<std::string>(share);
  if (name == "auto") return {};
  throw nb::value_error(
      ("[config] policy.static_share: expected a share of 0 to 1, or \"auto\", got \"" + name +
       "\"")
          .c_str());
}

Share share_of(const Prkv& s) {
  if (s.static_share) return *s.static_share;
  return "auto";
}

PageDigest parse_digest(const std::string& name) {
  if (name == "mean") return PageDigest::kMean;
  if (name == "max") return PageDigest::kMax;
  throw nb::value_error(
      ("[config] policy.digest: expected \"mean\" or \"max\", got \"" + name + "\"").c_str());
}

const char* text(PageDigest digest) { return digest == PageDigest::kMax ? "max" : "mean"; }

nb::dict fields_of(const Prkv& s) {
  nb::dict fields;
  fields["budget"] = s.budget;
  fields["static_share"] = share_of(s);
  fields["page"] = s.page;
  fields["digest"] = text(s.digest);
  return fields;
}

constexpr const char* kPrkvDoc =
    R"(A budget of rows is spent on two things: rows that the last 64 queries looked at most, which
are kept, chosen anew each time that tokens enter the retrieval zone; and pages of neighbours, found
for each query by a digest of their keys, without the rows that are kept.

All rows stay stored: truncate, fork, read and attend are exact. Until there were queries to choose
by, pages have the whole budget: a prompt brings its own by prefill(q=).

budget
    Rows of the zone that decode attends to per kv head, at most.
static_share
    Of the budget, for rows that are kept: 0 is ArkVale, pages alone; 1 is a SnapKV that is
    refreshed, without pages. "auto": as far as the first and the last of a prompt's 64 queries
    agree on the best rows. In whole pages' worth; what these leave over goes to rows.
page
    Neighbours: 8, 16, 32 or 64.
digest
    "mean": the middle of a page's keys and their mean distance from it, channel by channel.
    "max": to the farthest of them, so that a page's score is a bound of its keys' products.

Raises ValueError, with what was expected and what came.)";

void bind_prkv(nb::module_& m) {
  const Prkv defaults;
  nb::class_<Prkv> prkv(m, "PRKV", kPrkvDoc);
  const nb::object maker = nb::cpp_function(
      [](int64_t budget, const Share& static_share, int64_t page, const std::string& digest) {
        Prkv settings;
        settings.budget = budget;
        settings.static_share = parse_share(static_share);
        settings.page = page;
        settings.digest = parse_digest(digest);
        settings.validate();
        return settings;
      },
      nb::kw_only(), nb::arg("budget") = defaults.budget,
      nb::arg("static_share") = share_of(defaults), nb::arg("page") = defaults.page,
      nb::arg("digest") = text(defaults.digest));
  prkv.def_ro("budget", &Prkv::budget)
      .def_prop_ro("static_share", &share_of)
      .def_ro("page", &Prkv::page)
      .def_prop_ro("digest", [](const Prkv& s) { return text(s.digest); });
  bind_value(prkv, "PRKV", fields_of, maker,
             {"[config] policy.", {}, {}, {{"static_share", Either::kNumberOrString}}});
}

}  // namespace

void bind_policies(nb::module_& m) {
  bind_pariskv(m);
  bind_hardkv(m);
  bind_prkv(m);
}

}  // namespace pariskv::python
