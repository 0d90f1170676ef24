// Config, from keywords.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <optional>

#include "arguments.h"
#include "arrays.h"
#include "fields.h"
#include "module.h"
#include "nearest.h"

namespace pariskv::python {

namespace {

Placement parse_placement(const std::string& name) {
  if (name == "auto") return Placement::kAuto;
  if (name == "host") return Placement::kHost;
  if (name == "device") return Placement::kDevice;
  throw nb::value_error(("[config] placement: expected \"auto\", \"host\" or \"device\", got \"" +
                         name + "\"" + did_you_mean(name, {"\"auto\"", "\"host\"", "\"device\""}))
                            .c_str());
}

const char* text(Placement placement) {
  switch (placement) {
    case Placement::kHost:
      return "host";
    case Placement::kDevice:
      return "device";
    default:
      return "auto";
  }
}

KVDType parse_kv_dtype(const std::string& name) {
  if (name == "auto") return KVDType::kAuto;
  if (name == "int8") return KVDType::kInt8;
  throw nb::value_error(
      ("[config] kv_dtype: expected \"auto\" or \"int8\", got \"" + name + "\"").c_str());
}

const char* text(KVDType type) { return type == KVDType::kInt8 ? "int8" : "auto"; }

using DenseBelow = std::variant<int64_t, std::string>;

int64_t parse_dense_below(const DenseBelow& given) {
  if (const auto* tokens = std::get_if<int64_t>(&given)) {
    if (*tokens != kDenseByBatch) return *tokens;
    throw nb::value_error(
        "[config] dense_below: expected a number of tokens, \"batch\", or -1 for the policy's own, "
        "got -2");
  }
  const auto& name = std::get<std::string>(given);
  if (name == "batch") return kDenseByBatch;
  throw nb::value_error(
      ("[config] dense_below: expected a number of tokens or \"batch\", got \"" + name + "\"")
          .c_str());
}

DenseBelow spelled_dense_below(int64_t tokens) {
  if (tokens == kDenseByBatch) return "batch";
  return tokens;
}

/** "cpu", "cuda", "cuda:1" or a torch.device, whose text is one of these. */
Device parse_device(nb::handle device) {
  const auto name = nb::cast<std::string>(nb::str(device));
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceType::kCuda, 0};
  if (name.rfind("cuda:", 0) == 0 && name.size() > 5 && name.size() < 10 &&
      name.find_first_not_of("0123456789", 5) == std::string::npos) {
    return {DeviceType::kCuda, int32_t(std::stoi(name.substr(5)))};
  }
  const bool gpu = name.rfind("gpu", 0) == 0 || name.rfind("GPU", 0) == 0 || name == "nvidia";
  const std::string hint =
      gpu ? "; did you mean \"cuda\"?" : did_you_mean(name, {"\"cpu\"", "\"cuda\""});
  throw nb::value_error(
      ("[config] device: expected \"cpu\" or \"cuda:<index>\", got \"" + name + "\"" + hint)
          .c_str());
}

/** Bytes as a number, or in words: "4GB" is 4 * 10^9, "4GiB" 4 * 2^30; empty: neither. */
std::optional<int64_t> bytes_of(std::string text) {
  text.erase(std::remove_if(text.begin(), text.end(),
                            [](char c) { return c == ' ' || c == ',' || c == '_'; }),
             text.end());
  for (char& letter : text) letter = char(std::tolower(static_cast<unsigned char>(letter)));
  const size_t end = text.find_first_not_of("0123456789.");
  std::string unit = end == std::string::npos ? "" : text.substr(end);
  if (!unit.empty() && unit.back() == 'b') unit.pop_back();
  const bool binary = unit.size() > 1 && unit.back() == 'i';
  if (binary) unit.pop_back();
  const size_t power = std::string("kmgt").find(unit);
  if (end == 0 || unit.size() > 1 || power == std::string::npos) return {};
  // Python's own: whatever the locale writes in place of a point.
  const double number = PyOS_string_to_double(text.substr(0, end).c_str(), nullptr, nullptr);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return {};
  }
  const double bytes =
      number * std::pow(binary ? 1024.0 : 1000.0, unit.empty() ? 0.0 : double(power + 1));
  if (!(bytes < 9e18)) return {};
  return int64_t(std::llround(bytes));
}

/** @param given  an integer or a string */
int64_t parse_bytes(const char* field, nb::handle given) {
  const std::string place = std::string("[config] ") + field;
  if (PyIndex_Check(given.ptr())) {
    const auto index = nb::steal<nb::object>(PyNumber_Index(given.ptr()));
    int overflow = 0;
    const long long number =
        index.is_valid() ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : -1;
    if (!index.is_valid()) PyErr_Clear();
    if (index.is_valid() && overflow == 0) return number;
    throw nb::value_error((place + ": expected an integer of 64 bits, got " +
                           nb::steal<nb::str>(PyObject_Str(given.ptr())).c_str())
                              .c_str());
  }
  const auto text = nb::cast<std::string>(given);
  const std::optional<int64_t> bytes = bytes_of(text);
  if (!bytes) {
    throw nb::value_error(
        (place + ": expected bytes, an integer or as \"4GB\" or \"4GiB\", got \"" + text + "\"")
            .c_str());
  }
  return *bytes;
}

constexpr const char* kFootprintDoc =
    R"(A bound of memory by name and place, for a server that decides how many sequences it begins.

At any time, also inside a call, `sequences` sequences take at most this, whatever their lengths, each up to
`longest`, and `tokens` their sum, each length rounded up to a multiple of `multiple`. A fork counts like any
other sequence. Without `tokens`, all are of the longest length; with 0 it is what sequences take besides, and with
sequences=0 what tokens take alone. Short sequences have no summaries: the fewer tokens a sequence may have, the less it takes.

What they take is stats().memory.live without workspace_bytes and without the same of the cache
before its first sequence, and stats().host_memory.live. Not in it: rows in dtype of the tokens of a
prefill or attend with kv_dtype="int8"; with placement="host" rows on their way to host memory;
sequences from files of caches with other regions. With placement="auto" "resident rows" and "opening rows" are
among "rows" and counted again: they are what cannot leave.)";

constexpr const char* kBoundDoc =
    R"(The bound of footprint() as two sums, of which one grows with tokens:

    tokens * bytes_per_token(most) + sequences * bytes_per_sequence(most, multiple)

With whole segments (segment_tokens) as `multiple` nothing is lost to rounding; of single tokens, up to a
segment a sequence is, on the CPU up to 64 tokens where it has no zone. With placement="auto" they are of rows
that stay: while the budget has room for the bound, none have to leave.)";

nb::dict fields_of(const Config& c) {
  nb::dict fields;
  fields["layers"] = c.layers;
  fields["query_heads"] = c.query_heads;
  fields["kv_heads"] = c.kv_heads;
  fields["head_dim"] = c.head_dim;
  fields["value_dim"] = c.value_dim;
  fields["dtype"] = name_of(c.dtype);
  fields["sink"] = c.sink;
  fields["local"] = c.local;
  fields["update"] = c.update;
  fields["dense_below"] = spelled_dense_below(c.dense_below);
  fields["policy"] = c.policy;
  fields["device"] = name_of(c.device);
  fields["threads"] = c.threads;
  fields["segment_tokens"] = c.segment_tokens;
  fields["memory_budget"] = c.memory_budget;
  fields["placement"] = text(c.placement);
  fields["row_cache"] = c.row_cache;
  fields["host_budget"] = c.host_budget;
  fields["kv_dtype"] = text(c.kv_dtype);
  return fields;
}

const char* text(Place place) {
  constexpr const char* kNames[] = {"device", "host", "either"};
  return kNames[int(place)];
}

void bind_footprint(nb::module_& m) {
  nb::class_<Entry>(m, "Entry", "Bytes of a footprint that have a name.")
      .def_prop_ro("name", [](const Entry& entry) { return std::string(entry.name); })
      .def_prop_ro(
          "place", [](const Entry& entry) { return text(entry.place); },
          nb::sig("def place(self) -> Literal['device', 'host', 'either']"),
          "\"device\", \"host\" beside a GPU, or \"either\": on the GPU as long as there is room.")
      .def_ro("bytes", &Entry::bytes)
      .def("__repr__", [](const Entry& entry) {
        nb::dict fields;
        fields["name"] = std::string(entry.name);
        fields["place"] = text(entry.place);
        fields["bytes"] = entry.bytes;
        return text_of_fields("Entry", fields);
      });
  const auto at = [](Place place) {
    return [place](const Footprint& found) { return found.at(place); };
  };
  nb::class_<Footprint>(m, "Footprint", "What sequences take at most: entries, and their sums.")
      .def_ro("entries", &Footprint::entries, "Those of any bytes.")
      .def_prop_ro("device", at(Place::kDevice), "Of the cache's device.")
      .def_prop_ro("host", at(Place::kHost), "Of host memory beside a GPU.")
      .def_prop_ro("either", at(Place::kEither),
                   "Of the GPU as long as there is room, then of host memory.")
      .def(
          "__getitem__",
          [](const Footprint& found, const std::string& name) { return found.of(name); },
          nb::arg("name"), "Bytes of an entry; 0 where there is none.")
      .def("__repr__", [](const Footprint& found) {
        nb::dict fields;
        for (const Entry& entry : found.entries) fields[entry.name.data()] = entry.bytes;
        return text_of_fields("Footprint", fields);
      });
}

/** What sequences take at most. */
void bind_bytes(nb::module_& m, nb::class_<Config>& config) {
  nb::class_<Bytes>(m, "Bytes", "Of a cache's device, and of host memory beside a GPU.")
      .def_ro("device", &Bytes::device)
      .def_ro("host", &Bytes::host)
      .def("__repr__", [](const Bytes& bytes) {
        nb::dict fields;
        fields["device"] = bytes.device;
        fields["host"] = bytes.host;
        return text_of_fields("Bytes", fields);
      });
  bind_footprint(m);
  static const Parameters footprint("footprint", {}, {},
                                    {"longest", "sequences", "tokens", "multiple"});
  static const Parameters per_token("bytes_per_token", {}, {"most_tokens"}, {});
  static const Parameters per_sequence("bytes_per_sequence", {}, {"most_tokens", "multiple"}, {});
  config
      .def(
          "footprint",
          [](const Config& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Arguments given(footprint, positional, keywords);
            Load load;
            load.longest = given.integer("longest", load.longest);
            load.sequences = given.integer("sequences", load.sequences);
            if (!given["tokens"].is_none()) load.tokens = given.integer("tokens");
            load.multiple = given.integer("multiple", load.multiple);
            return self.footprint(load);
          },
          nb::sig("def footprint(self, *, longest: int = 8388608, sequences: int = 1, "
                  "tokens: int | None = None, multiple: int = 1) -> Footprint"),
          kFootprintDoc)
      .def(
          "bytes_per_token",
          [](const Config& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Arguments given(per_token, positional, keywords);
            return self.bytes_per_token(given.integer("most_tokens", kMostTokens));
          },
          nb::sig("def bytes_per_token(self, most_tokens: int = 8388608) -> Bytes"), kBoundDoc)
      .def(
          "bytes_per_sequence",
          [](const Config& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Arguments given(per_sequence, positional, keywords);
            return self.bytes_per_sequence(given.integer("most_tokens", kMostTokens),
                                           given.integer("multiple", 1));
          },
          nb::sig("def bytes_per_sequence(self, most_tokens: int = 8388608, multiple: int = 1) "
                  "-> Bytes"),
          "What a sequence takes besides its tokens, see bytes_per_token.");
}

constexpr const char* kDoc =
    R"(What a cache is told when it is made. A value: configs compare, copy and pickle, and
`config.replace(local=64)` is another one.

layers, query_heads, kv_heads, head_dim, dtype
    The model. query_heads is a whole multiple of kv_heads; head_dim is one of HEAD_DIMS;
    dtype is "float32", "float16" or "bfloat16", or the type of torch or NumPy.
value_dim
    Of values and outputs, where it is not head_dim, which is then of queries and keys alone:
    one of HEAD_DIMS; 0 is head_dim, as which it reads back.
sink, local, update
    Tokens of a sequence's regions, [sink | retrieval | local | update buffer]; -1 is the
    policy's own: 4, 256 and 512 for ParisKV, 4, 32 and 128 for HardKV, 4, 64 and 128 for
    PRKV. They read back as the sizes themselves.
dense_below
    Sequences with fewer tokens are attended to in full; -1 is the policy's own: for
    ParisKV 4,096 on a CPU, 8,192 on a GPU with room for the rows and 2,048 on one without; 0 for
    HardKV and PRKV. "batch", for ParisKV on a GPU with room: each step attends in full where its batch takes as long that way, one sequence up
    to 22,016 tokens and many up to 5,632 (docs/memory.md). Results then depend on the batch.
policy
    How rows are chosen: ParisKV(...), which is also the default, HardKV(...) or PRKV(...).
device
    "cpu", "cuda" or "cuda:<index>", or a torch.device.
threads
    Of the CPU backend; 0 takes one per core.
segment_tokens
    Tokens that have their summaries in one piece, and on a GPU their rows; a multiple of 64. On the
    CPU rows come in blocks of 64 tokens. -1: 128 where rows stay on a GPU, else 1,024.
memory_budget
    The most bytes to hold on the device, an integer or as "4GB" or "4GiB"; 0 is no limit, but with
    the placement "auto" nine tenths of what is free when the cache is made.
placement
    Where a cache on a GPU keeps the rows of retrieval zones. "auto": in the GPU's own memory as
    long as memory_budget has room, then in host memory, those of the longest unused sequences
    first. "host": in host memory. "device": in the GPU's own memory.
row_cache
    Fetched rows per kv head, layer and sequence that such a cache keeps on the GPU, so that a
    row that stays selected crosses the bus once. Rounded up to a power of two, at least 16;
    0 is none, -1 twice the rows that a step selects.
host_budget
    The most bytes of host memory that such a cache may hold, likewise; 0 is no limit.
kv_dtype
    How rows of retrieval zones are stored: "auto" is as dtype, "int8" as 8 bits a number and
    a scale for each K and V, with ParisKV. All other rows stay in dtype.

Raises ValueError, with what was expected and what came.)";

}  // namespace

void bind_config(nb::module_& m) {
  const Config defaults;
  const std::string placements = literal({"auto", "host", "device"});
  const std::string kv_dtypes = literal({"auto", "int8"});
  nb::class_<Config> type(m, "Config", kDoc);
  const nb::object maker = nb::cpp_function(
      [](int64_t layers, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim,
         nb::handle dtype, int64_t sink, int64_t local, int64_t update,
         const DenseBelow& dense_below, const std::optional<PolicyConfig>& policy,
         nb::handle device, int64_t threads, int64_t segment_tokens, nb::handle memory_budget,
         const std::string& placement, int64_t row_cache, nb::handle host_budget,
         const std::string& kv_dtype) {
        Config config;
        config.layers = layers;
        config.query_heads = query_heads;
        config.kv_heads = kv_heads;
        config.head_dim = head_dim;
        config.value_dim = value_dim;
        config.dtype = parse_dtype(dtype);
        config.sink = sink;
        config.local = local;
        config.update = update;
        config.dense_below = parse_dense_below(dense_below);
        if (policy) config.policy = *policy;
        config.device = parse_device(device);
        config.threads = threads;
        config.segment_tokens = segment_tokens;
        config.memory_budget = parse_bytes("memory_budget", memory_budget);
        config.placement = parse_placement(placement);
        config.row_cache = row_cache;
        config.host_budget = parse_bytes("host_budget", host_budget);
        config.kv_dtype = parse_kv_dtype(kv_dtype);
        config.validate();
        return config;
      },
      nb::kw_only(), nb::arg("layers"), nb::arg("query_heads"), nb::arg("kv_heads"),
      nb::arg("head_dim"), nb::arg("value_dim") = defaults.value_dim, nb::arg("dtype") = "bfloat16",
      nb::arg("sink") = defaults.sink, nb::arg("local") = defaults.local,
      nb::arg("update") = defaults.update, nb::arg("dense_below") = defaults.dense_below,
      nb::arg("policy").none() = nb::none(), nb::arg("device") = "cpu",
      nb::arg("threads") = defaults.threads, nb::arg("segment_tokens") = defaults.segment_tokens,
      nb::arg("memory_budget") = defaults.memory_budget,
      nb::arg("placement") = text(defaults.placement), nb::arg("row_cache") = defaults.row_cache,
      nb::arg("host_budget") = defaults.host_budget, nb::arg("kv_dtype") = text(defaults.kv_dtype));
  type.def_ro("layers", &Config::layers)
      .def_ro("query_heads", &Config::query_heads)
      .def_ro("kv_heads", &Config::kv_heads)
      .def_ro("head_dim", &Config::head_dim)
      .def_prop_ro("value_dim", [](const Config& c) { return c.resolved().value_dim; })
      .def_prop_ro(
          "dtype", [](const Config& c) { return name_of(c.dtype); },
          nb::for_getter(nb::sig("def dtype(self) -> pariskv_core._array.DTypeName")))
      .def_prop_ro("sink", [](const Config& c) { return c.resolved().sink; })
      .def_prop_ro("local", [](const Config& c) { return c.resolved().local; })
      .def_prop_ro("update", [](const Config& c) { return c.resolved().update; })
      .def_prop_ro(
          "dense_below",
          [](const Config& c) { return spelled_dense_below(c.resolved().dense_below); },
          nb::for_getter(nb::sig("def dense_below(self) -> int | typing.Literal['batch']")))
      .def_prop_ro(
          "searched_from", &Config::searched_from,
          "Tokens from which a step may search: dense_below, or with \"batch\" the least of "
          "any batch.")
      .def_ro("policy", &Config::policy)
      .def_prop_ro(
          "device", [](const Config& c) { return name_of(c.device); },
          nb::for_getter(nb::sig("def device(self) -> pariskv_core._array.DeviceName")))
      .def_ro("threads", &Config::threads)
      .def_prop_ro("segment_tokens", [](const Config& c) { return c.resolved().segment_tokens; })
      .def_ro("memory_budget", &Config::memory_budget)
      .def_prop_ro(
          "placement", [](const Config& c) { return text(c.placement); },
          nb::for_getter(nb::sig(("def placement(self) -> " + placements).c_str())))
      .def_ro("row_cache", &Config::row_cache)
      .def_ro("host_budget", &Config::host_budget)
      .def_prop_ro(
          "kv_dtype", [](const Config& c) { return text(c.kv_dtype); },
          nb::for_getter(nb::sig(("def kv_dtype(self) -> " + kv_dtypes).c_str())));
  bind_bytes(m, type);
  bind_value(type, "Config", fields_of, maker,
             {"[config] ",
              {"layers", "query_heads", "kv_heads", "head_dim"},
              {"dtype", "device"},
              {{"memory_budget", Either::kBytes},
               {"host_budget", Either::kBytes},
               {"dense_below", Either::kIntegerOrString}},
              {{"dtype",
                "pariskv_core._array.DTypeName | pariskv_core._array.DTypeLike | type[typing.Any]"},
               {"device", "pariskv_core._array.DeviceName | pariskv_core._array.DeviceLike"},
               {"placement", placements},
               {"kv_dtype", kv_dtypes},
               {"dense_below", "int | typing.Literal['batch']"},
               {"memory_budget", "int | str"},
               {"host_budget", "int | str"}}});
}

}  // namespace pariskv::python
