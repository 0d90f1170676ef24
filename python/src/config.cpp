// Config, from keywords.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "module.h"
#include "text.h"

namespace pariskv::python {

namespace {

using Step = std::tuple<int64_t, double, double>;

Scorer parse_scorer(const std::string& name) {
  if (name == "sign_norm") return Scorer::kSignNorm;
  if (name == "votes") return Scorer::kVotes;
  throw nb::value_error(
      ("[config] scorer: expected \"sign_norm\" or \"votes\", got \"" + name + "\"").c_str());
}

const char* text(Scorer scorer) { return scorer == Scorer::kVotes ? "votes" : "sign_norm"; }

GroupRule parse_group_rule(const std::string& name) {
  if (name == "attention_mass") return GroupRule::kAttentionMass;
  if (name == "mean_query") return GroupRule::kMeanQuery;
  throw nb::value_error(
      ("[config] group_rule: expected \"attention_mass\" or \"mean_query\", got \"" + name + "\"")
          .c_str());
}

const char* text(GroupRule rule) {
  return rule == GroupRule::kMeanQuery ? "mean_query" : "attention_mass";
}

Placement parse_placement(const std::string& name) {
  if (name == "host") return Placement::kHost;
  if (name == "device") return Placement::kDevice;
  throw nb::value_error(
      ("[config] placement: expected \"host\" or \"device\", got \"" + name + "\"").c_str());
}

const char* text(Placement placement) {
  return placement == Placement::kDevice ? "device" : "host";
}

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceType::kCuda, 0};
  if (name.rfind("cuda:", 0) == 0 && name.size() > 5 && name.size() < 10 &&
      name.find_first_not_of("0123456789", 5) == std::string::npos) {
    return {DeviceType::kCuda, int32_t(std::stoi(name.substr(5)))};
  }
  throw nb::value_error(
      ("[config] device: expected \"cpu\" or \"cuda:<index>\", got \"" + name + "\"").c_str());
}

std::string text(const Device& device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::vector<Step> steps_of(const Config& config) {
  std::vector<Step> steps;
  for (const ScheduleStep& step : config.schedule) {
    steps.emplace_back(step.from_tokens, step.candidate_ratio, step.vote_ratio);
  }
  return steps;
}

std::string repr(const Config& c) {
  Text out;
  out << "Config(layers=" << c.layers << ", query_heads=" << c.query_heads
      << ", kv_heads=" << c.kv_heads << ", head_dim=" << c.head_dim << ", dtype=\""
      << name_of(c.dtype) << "\", sink=" << c.sink << ", local=" << c.local
      << ", update=" << c.update << ", top_k=" << c.top_k << ", dense_below=" << c.dense_below
      << ", scorer=\"" << text(c.scorer) << "\", group_rule=\"" << text(c.group_rule)
      << "\", schedule=[";
  const char* separator = "";
  for (const ScheduleStep& step : c.schedule) {
    out << separator << "(" << step.from_tokens << ", " << step.candidate_ratio << ", "
        << step.vote_ratio << ")";
    separator = ", ";
  }
  out << "], min_candidates_per_row=" << c.min_candidates_per_row << ", seed=" << c.seed
      << ", device=\"" << text(c.device) << "\", threads=" << c.threads
      << ", segment_tokens=" << c.segment_tokens << ", memory_budget=" << c.memory_budget
      << ", placement=\"" << text(c.placement) << "\", row_cache=" << c.row_cache
      << ", host_budget=" << c.host_budget << ")";
  return out.text;
}

constexpr const char* kDoc = R"(What a cache is told when it is made.

layers, query_heads, kv_heads, head_dim, dtype
    The model. query_heads is a whole multiple of kv_heads; head_dim is 64, 80, 96, 128
    or 256; dtype is "float32", "float16" or "bfloat16", or the type of torch or NumPy.
sink, local, update
    Tokens of a sequence's regions, [sink | retrieval | local | update buffer].
top_k
    Rows attended to per kv head besides the resident ones.
dense_below
    Sequences with fewer tokens are attended to in full.
scorer
    "sign_norm", or the paper's "votes".
group_rule
    "attention_mass", or the paper's "mean_query".
schedule
    Steps (from_tokens, candidate_ratio, vote_ratio), by tokens in the retrieval zone.
min_candidates_per_row
    Candidates are never fewer than this times top_k.
seed
    Of the rotation's signs.
device
    "cpu", "cuda" or "cuda:<index>".
threads
    Of the CPU backend; 0 takes one per core.
segment_tokens
    The store grows by this much.
memory_budget
    The most bytes to hold on the device; 0 is no limit.
placement
    Where a cache on a GPU keeps the rows of retrieval zones: "host" or "device".
row_cache
    Fetched rows per kv head, layer and sequence that such a cache keeps on the GPU, so that a
    row that stays selected crosses the bus once. Rounded up to a power of two, at least 16;
    0 is none, -1 twice top_k.
host_budget
    The most bytes of host memory that such a cache may hold; 0 is no limit.

Raises ValueError, with what was expected and what came.)";

}  // namespace

void bind_config(nb::module_& m) {
  nb::class_<Config>(m, "Config", kDoc)
      .def(
          "__init__",
          [](Config* self, int64_t layers, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
             nb::handle dtype, int64_t sink, int64_t local, int64_t update, int64_t top_k,
             int64_t dense_below, const std::string& scorer, const std::string& group_rule,
             const std::vector<Step>& schedule, int64_t min_candidates_per_row, uint64_t seed,
             const std::string& device, int64_t threads, int64_t segment_tokens,
             int64_t memory_budget, const std::string& placement, int64_t row_cache,
             int64_t host_budget) {
            Config config;
            config.layers = layers;
            config.query_heads = query_heads;
            config.kv_heads = kv_heads;
            config.head_dim = head_dim;
            config.dtype = parse_dtype(dtype);
            config.sink = sink;
            config.local = local;
            config.update = update;
            config.top_k = top_k;
            config.dense_below = dense_below;
            config.scorer = parse_scorer(scorer);
            config.group_rule = parse_group_rule(group_rule);
            config.schedule.clear();
            for (const auto& [from_tokens, candidate_ratio, vote_ratio] : schedule) {
              config.schedule.push_back({from_tokens, candidate_ratio, vote_ratio});
            }
            config.min_candidates_per_row = min_candidates_per_row;
            config.seed = seed;
            config.device = parse_device(device);
            config.threads = threads;
            config.segment_tokens = segment_tokens;
            config.memory_budget = memory_budget;
            config.placement = parse_placement(placement);
            config.row_cache = row_cache;
            config.host_budget = host_budget;
            config.validate();
            new (self) Config(std::move(config));
          },
          nb::kw_only(), nb::arg("layers"), nb::arg("query_heads"), nb::arg("kv_heads"),
          nb::arg("head_dim"), nb::arg("dtype") = "bfloat16", nb::arg("sink") = Config().sink,
          nb::arg("local") = Config().local, nb::arg("update") = Config().update,
          nb::arg("top_k") = Config().top_k, nb::arg("dense_below") = Config().dense_below,
          nb::arg("scorer") = text(Config().scorer),
          nb::arg("group_rule") = text(Config().group_rule),
          nb::arg("schedule") = steps_of(Config()),
          nb::arg("min_candidates_per_row") = Config().min_candidates_per_row,
          nb::arg("seed") = Config().seed, nb::arg("device") = "cpu",
          nb::arg("threads") = Config().threads,
          nb::arg("segment_tokens") = Config().segment_tokens,
          nb::arg("memory_budget") = Config().memory_budget,
          nb::arg("placement") = text(Config().placement),
          nb::arg("row_cache") = Config().row_cache, nb::arg("host_budget") = Config().host_budget)
      .def_ro("layers", &Config::layers)
      .def_ro("query_heads", &Config::query_heads)
      .def_ro("kv_heads", &Config::kv_heads)
      .def_ro("head_dim", &Config::head_dim)
      .def_prop_ro("dtype", [](const Config& c) { return name_of(c.dtype); })
      .def_ro("sink", &Config::sink)
      .def_ro("local", &Config::local)
      .def_ro("update", &Config::update)
      .def_ro("top_k", &Config::top_k)
      .def_ro("dense_below", &Config::dense_below)
      .def_prop_ro("scorer", [](const Config& c) { return text(c.scorer); })
      .def_prop_ro("group_rule", [](const Config& c) { return text(c.group_rule); })
      .def_prop_ro("schedule", &steps_of)
      .def_ro("min_candidates_per_row", &Config::min_candidates_per_row)
      .def_ro("seed", &Config::seed)
      .def_prop_ro("device", [](const Config& c) { return text(c.device); })
      .def_ro("threads", &Config::threads)
      .def_ro("segment_tokens", &Config::segment_tokens)
      .def_ro("memory_budget", &Config::memory_budget)
      .def_prop_ro("placement", [](const Config& c) { return text(c.placement); })
      .def_ro("row_cache", &Config::row_cache)
      .def_ro("host_budget", &Config::host_budget)
      .def("__repr__", &repr);
}

}  // namespace pariskv::python
