// The policies, each from keywords.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "fields.h"
#include "module.h"
#include "nearest.h"
#include "pariskv/pariskv.h"

namespace pariskv::python {

namespace nb = nanobind;

namespace {

/**
 * A field of settings S: what Python reads, what makes equal settings again, and how it is set.
 * T is the type of the constructor's argument.
 */
template <typename S, typename T, typename Read, typename Kept, typename Set>
struct Field {
  using Argument = T;
  const char* name;
  Read read;
  Kept kept;
  Set set;
  std::string type{};  // of the stub, where T is wider than what is taken

  Field typed(std::string narrower) const {
    Field same = *this;
    same.type = std::move(narrower);
    return same;
  }
};

template <typename T, typename S, typename Read, typename Kept, typename Set>
Field<S, T, Read, Kept, Set> field(const char* name, Read read, Kept kept, Set set) {
  return {name, read, kept, set};
}

/** A number, as it is. */
template <typename S, typename T>
auto plain(const char* name, T S::* member) {
  const auto read = [member](const S& s) { return s.*member; };
  return field<T, S>(name, read, read, [member](S& s, const T& value) { s.*member = value; });
}

/** What Python knows as another type. */
template <typename T, typename S, typename Read, typename Parse, typename Own>
auto spelled(const char* name, Own S::* member, Read read, Parse parse) {
  const auto of = [member, read](const S& s) { return read(s.*member); };
  return field<T, S>(name, of, of,
                     [member, parse](S& s, const T& value) { s.*member = parse(value); });
}

template <typename E>
using Names = std::vector<std::pair<const char*, E>>;

template <typename E>
E parse(const std::string& field, const Names<E>& names, const std::string& given) {
  std::string expected;
  std::vector<std::string> known;
  for (size_t i = 0; i < names.size(); ++i) {
    if (given == names[i].first) return names[i].second;
    const char* separator = i == 0 ? "" : i + 1 < names.size() ? ", " : " or ";
    known.push_back("\"" + std::string(names[i].first) + "\"");
    expected += separator + known.back();
  }
  throw nb::value_error(("[config] policy." + field + ": expected " + expected + ", got \"" +
                         given + "\"" + did_you_mean(given, known))
                            .c_str());
}

/** One of several, by its name. */
template <typename S, typename E>
auto named(const char* name, E S::* member, const Names<E>& names) {
  const auto text = [names](E value) {
    return std::find_if(names.begin(), names.end(),
                        [&](const auto& n) { return n.second == value; })
        ->first;
  };
  std::vector<const char*> spellings;
  for (const auto& each : names) spellings.push_back(each.first);
  const auto take = [name, names](const std::string& given) { return parse(name, names, given); };
  return spelled<std::string>(name, member, text, take).typed(literal(spellings));
}

/** The one list of a policy's fields: its constructor, its properties and what is pickled. */
template <typename S, typename... F>
void bind_policy(nb::module_& m, const char* name, const char* doc,
                 std::map<std::string, Either> either, F... fields) {
  const S defaults;
  nb::class_<S> type(m, name, doc);
  const nb::object maker = nb::cpp_function(
      [fields...](const typename F::Argument&... values) {
        S settings;
        (fields.set(settings, values), ...);
        settings.validate();
        return settings;
      },
      nb::kw_only(), (nb::arg(fields.name) = fields.kept(defaults))...);
  std::map<std::string, std::string> types;
  const auto bind = [&](const auto& each) {
    if (each.type.empty()) {
      type.def_prop_ro(each.name, each.read);
      return;
    }
    types[each.name] = each.type;
    const std::string getter = std::string("def ") + each.name + "(self) -> " + each.type;
    type.def_prop_ro(each.name, each.read, nb::for_getter(nb::sig(getter.c_str())));
  };
  (bind(fields), ...);
  const auto kept = [fields...](const S& settings) {
    nb::dict values;
    ((values[fields.name] = fields.kept(settings)), ...);
    return values;
  };
  bind_value(type, name, kept, maker, {"[config] policy.", {}, {}, std::move(either), types});
}

using Step = std::tuple<int64_t, double, double>;

/** Those that hold: the policy's own where none are set. */
std::vector<Step> steps_of(const ParisKV& given) {
  const ParisKV settings = given.resolved();
  std::vector<Step> steps;
  for (const ScheduleStep& step : settings.schedule) {
    steps.emplace_back(step.from_tokens, step.candidate_ratio, step.vote_ratio);
  }
  return steps;
}

std::optional<std::vector<Step>> schedule_of(const ParisKV& s) {
  if (s.schedule.empty()) return {};
  return steps_of(s);
}

void set_schedule(ParisKV& s, const std::optional<std::vector<Step>>& steps) {
  if (!steps) return;
  if (steps->empty()) {
    throw nb::value_error(
        "[config] policy.schedule: expected at least one step, or None, got none");
  }
  for (const auto& [from_tokens, candidate_ratio, vote_ratio] : *steps) {
    s.schedule.push_back({from_tokens, candidate_ratio, vote_ratio});
  }
}

constexpr const char* kParisKVDoc =
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
    Of the rotation's signs, and of the rows that are sampled. None: rows are sampled by a secret,
    one for each sequence, which the system gives each cache and no call tells: for a server of
    strangers' texts. Forks and loaded files keep what their sequence has; nothing is reproducible
    from one cache to the next.
block
    Neighbouring keys that share a mean: 64, 128 or 256. Summaries then hold what is left of a
    key without it, with the channels of keys and queries balanced; prefill(q=) helps with
    that. 0: whole keys, as published; so it is with votes.
tail
    What becomes of keys that are not selected. "sample" estimates their part of the attention
    from a row of each interval of the sequence, with the weight of the keys around it; "none"
    leaves it out.
    "own": sample where there are blocks.
tail_rows
    Rows that are sampled per kv head: as many to twice as many. Steps read copies of them in 8 bits.
error
    A budget by error, above 0 and below 1: rows are taken, best first, until the error that the
    sample is expected to add for the candidates that are left is at most this, less what other
    keys add; at least 16, at most top_k. It is a standard deviation, as a share of the spread of
    values.
    Cache.stats() then has the error that was reached, mean and worst, and the share of the
    attention on rows attended to exactly. Not with tail="none" or "mean_query". None: always
    top_k rows.

Raises ValueError, with what was expected and what came.)";

void bind_pariskv(nb::module_& m) {
  bind_policy<ParisKV>(
      m, "ParisKV", kParisKVDoc,
      {{"schedule", Either::kListOrNone},
       {"error", Either::kNumberOrNone},
       {"seed", Either::kIntegerOrNone}},
      plain("top_k", &ParisKV::top_k),
      named("scorer", &ParisKV::scorer,
            {{"sign_norm", Scorer::kSignNorm}, {"votes", Scorer::kVotes}}),
      named("group_rule", &ParisKV::group_rule,
            {{"attention_mass", GroupRule::kAttentionMass}, {"mean_query", GroupRule::kMeanQuery}}),
      field<std::optional<std::vector<Step>>, ParisKV>("schedule", steps_of, schedule_of,
                                                       set_schedule),
      plain("min_candidates_per_row", &ParisKV::min_candidates_per_row),
      plain("seed", &ParisKV::seed), plain("block", &ParisKV::block),
      named("tail", &ParisKV::tail,
            {{"sample", TailRule::kSample}, {"none", TailRule::kNone}, {"own", TailRule::kOwn}}),
      plain("tail_rows", &ParisKV::tail_rows), plain("error", &ParisKV::error));
}

constexpr const char* kHardKVDoc =
    R"(Nothing is searched for. Each time that tokens enter a retrieval zone, the last 32 queries
say how much attention its rows get, and each kv head keeps as many as it needs for a share p of
that; decode attends to these until the next time. For long answers.

All rows stay stored: truncate, fork, read and attend are exact. Until there were queries to choose
by, decode attends to the zone in full: a prompt brings its own by prefill(q=). With
placement="dropped" rows that were chosen from are given back.

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
placement
    "host": K and V of the zone stay stored, in host memory, or on a GPU if Config(placement=) says
    so. "dropped": decode gives back whole segments of the zone whose rows were chosen from, so
    memory stops growing with the answer. What needs these rows refuses: attend, read, a truncate
    into them, prefill without q. Cache.regions and Cache.stats say how many there are.

Raises ValueError, with what was expected and what came.)";

void bind_hardkv(nb::module_& m) {
  bind_policy<HardKV>(
      m, "HardKV", kHardKVDoc, {}, plain("most", &HardKV::most), plain("p", &HardKV::p),
      plain("least", &HardKV::least),
      named("metric", &HardKV::metric,
            {{"attention", KeepMetric::kAttention}, {"snapkv", KeepMetric::kSnapKv}}),
      plain("pool", &HardKV::pool), plain("patience", &HardKV::patience),
      named("placement", &HardKV::placement,
            {{"host", ZoneRows::kHost}, {"dropped", ZoneRows::kDropped}}));
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

Share share_of(const std::optional<double>& share) {
  if (share) return *share;
  return "auto";
}

constexpr const char* kPRKVDoc =
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
  bind_policy<PRKV>(
      m, "PRKV", kPRKVDoc, {{"static_share", Either::kNumberOrString}},
      plain("budget", &PRKV::budget),
      spelled<Share>("static_share", &PRKV::static_share, share_of, parse_share)
          .typed("float | typing.Literal['auto']"),
      plain("page", &PRKV::page),
      named("digest", &PRKV::digest, {{"mean", PageDigest::kMean}, {"max", PageDigest::kMax}}));
}

}  // namespace

void bind_policies(nb::module_& m) {
  bind_pariskv(m);
  bind_hardkv(m);
  bind_prkv(m);
}

}  // namespace pariskv::python
