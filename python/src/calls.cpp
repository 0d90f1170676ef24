// Cache's calls with arrays: unwrap them, drop the GIL, call.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "handle.h"

namespace pariskv::python {

namespace {

using Lengths = std::optional<std::vector<int64_t>>;

/** What each sequence has; may be left out when there is one sequence to have it all. */
std::vector<int64_t> lengths_of(const char* verb, const Lengths& lengths, const Batch& sequences,
                                const TensorView& packed) {
  if (lengths) return *lengths;
  if (sequences.size() == 1 && packed.rank > 0) return {packed.shape[0]};
  throw nb::value_error((std::string("[") + verb +
                         "] lengths: expected the tokens of each of the " +
                         std::to_string(sequences.size()) + " sequences, got none")
                            .c_str());
}

/** Keys and values of new tokens, or neither: then the call appends nothing. */
struct NewRows {
  std::optional<Borrowed> k, v;

  bool given() const { return k.has_value(); }
};

NewRows new_rows_of(const char* verb, nb::handle k, nb::handle v, DType dtype) {
  if (k.is_none() != v.is_none()) {
    throw nb::type_error((std::string("[") + verb + "] " + (k.is_none() ? "k" : "v") +
                          ": expected an array as for " + (k.is_none() ? "v" : "k") +
                          ", or neither, got NoneType")
                             .c_str());
  }
  if (k.is_none()) return {};
  return {borrow(verb, "k", k, dtype), borrow(verb, "v", v, dtype)};
}

/** The keyword arguments that decode, attend and explain share. */
struct Keywords {
  explicit Keywords(const Arguments& given)
      : scale(given.number("scale")),
        softcap(given.number("softcap", 0)),
        sink_bias(given["sink_bias"]) {}

  std::optional<double> scale;
  double softcap;
  nb::handle sink_bias;
};

struct Attention {
  AttendOptions options;
  Borrowed sink_bias, lse, error;
};

Attention attention_of(const char* verb, const Keywords& keywords) {
  Attention attention;
  attention.options.scale = keywords.scale;
  attention.options.softcap = keywords.softcap;
  if (!keywords.sink_bias.is_none()) {
    attention.sink_bias = borrow(verb, "sink_bias", keywords.sink_bias, DType::kFloat32);
    attention.options.sink_bias = attention.sink_bias.view;
  }
  return attention;
}

Precision precision_of(const Arguments& given) {
  const std::string name = given.text("precision", "exact");
  if (name == "exact") return Precision::kExact;
  if (name == "fast") return Precision::kFast;
  throw nb::value_error((std::string("[") + given.verb() +
                         "] precision: expected \"exact\" or \"fast\", got \"" + name + "\"")
                            .c_str());
}

/** Where a decode tells its error. */
struct ErrorOutput {
  bool returned = false;
  nb::handle given;  // an array of the caller's; none: there is none
};

ErrorOutput error_of(const Arguments& given) {
  const ErrorOutput error{given.flag("return_error"), given["error"]};
  if (error.returned && !error.given.is_none()) {
    throw nb::value_error("[decode] error: expected none beside return_error, which makes one");
  }
  return error;
}

/** Queries in, output out: what decode and attend do alike. */
template <typename Call>
nb::object attended(const Handle& handle, const Arguments& given, const ErrorOutput& error,
                    Call call) {
  const char* verb = given.verb();
  const nb::handle q = given["q"];
  auto out = nb::borrow<nb::object>(given["out"]);
  const Keywords keywords(given);
  const bool return_lse = given.flag("return_lse");
  // Held from here on: whose arrays come in may run Python, and close the cache.
  const std::shared_ptr<Cache> cache = handle.open();
  const Config& config = cache->config();
  const Borrowed query = borrow(verb, "q", q, config.dtype);
  if (query.view.dtype != config.dtype) {  // before a result of that type is made
    throw nb::value_error((std::string("[") + verb + "] q: expected " + name_of(config.dtype) +
                           ", got " + name_of(query.view.dtype))
                              .c_str());
  }
  Attention attention = attention_of(verb, keywords);
  const int64_t tokens = query.view.rank > 0 ? query.view.shape[0] : 0;
  if (out.is_none()) {
    out = empty_like(q, nb::make_tuple(tokens, config.query_heads, config.value_dim), config.dtype);
  }
  const Borrowed result = borrow_writable(verb, "out", out, config.dtype);
  nb::list results;
  results.append(out);
  const auto add_numbers = [&](const char* name, int64_t heads, Borrowed& borrowed,
                               std::optional<TensorView>& option) {
    results.append(empty_like(q, nb::make_tuple(tokens, heads), DType::kFloat32));
    borrowed = borrow_writable(verb, name, results[results.size() - 1], DType::kFloat32);
    option = borrowed.view;
  };
  if (return_lse) add_numbers("lse", config.query_heads, attention.lse, attention.options.lse);
  if (error.returned) {
    add_numbers("error", config.kv_heads, attention.error, attention.options.error);
  } else if (error.given.is_valid() && !error.given.is_none()) {
    attention.error = borrow_writable(verb, "error", error.given, DType::kFloat32);
    attention.options.error = attention.error.view;
  }
  unlocked(cache, [&](Cache& open) { call(open, query.view, result.view, attention.options); });
  if (results.size() > 1) return nb::tuple(results);
  return out;
}

nb::object prefill(const Handle& handle, const Arguments& given) {
  const int64_t layer = given.integer("layer");
  const Batch sequences = given.batch("sequences");
  const Lengths lengths = given.optional_integers("lengths");
  PrefillOptions options;
  options.scale = given.number("scale");
  options.softcap = given.number("softcap", 0);
  const StreamHandle stream = given.stream();

  const DType dtype = handle.open()->config().dtype;
  const Borrowed keys = borrow("prefill", "k", given["k"], dtype);
  const Borrowed values = borrow("prefill", "v", given["v"], dtype);
  std::optional<Borrowed> queries;
  if (!given["q"].is_none()) {
    queries.emplace(borrow("prefill", "q", given["q"], dtype));
    options.q = queries->view;
  }
  const std::vector<int64_t> tokens = lengths_of("prefill", lengths, sequences, keys.view);
  const Stream queue = stream_of(stream, handle);
  std::vector<int64_t> unserved;
  const auto page_rows = given.optional_integers("page_rows");
  if (page_rows) options.page_rows = *page_rows, options.unserved = &unserved;
  unlocked(handle, [&](Cache& cache) {
    cache.prefill(layer, sequences, tokens, keys.view, values.view, options, queue);
  });
  if (!page_rows) return nb::none();
  nb::list places;
  for (const int64_t place : unserved) places.append(place);
  return places;
}

/** A function that a decode calls when rows are there; none: there is none. */
std::function<void()> dense_of(const Arguments& given) {
  const nb::handle dense = given["dense"];
  if (dense.is_none()) return {};
  if (PyCallable_Check(dense.ptr()) == 0) refuse_type("[decode] dense", "a function", dense);
  return [dense] { Unlocked::call_python([&] { nb::borrow<nb::object>(dense)(); }); };
}

nb::object decode(const Handle& handle, const Arguments& given) {
  const int64_t layer = given.integer("layer");
  const Batch sequences = given.batch("sequences");
  const StreamHandle stream = given.stream();
  const DType dtype = handle.open()->config().dtype;
  const NewRows rows = new_rows_of("decode", given["k"], given["v"], dtype);
  const Stream queue = stream_of(stream, handle);
  const std::function<void()> dense = dense_of(given);
  const auto page_rows = given.optional_integers("page_rows");
  return attended(
      handle, given, error_of(given),
      [&](Cache& cache, const TensorView& query, const TensorView& result, AttendOptions options) {
        options.dense = dense;
        if (page_rows) options.page_rows = *page_rows;
        if (!rows.given()) return cache.decode(layer, sequences, query, result, options, queue);
        cache.decode(layer, sequences, query, rows.k->view, rows.v->view, result, options, queue);
      });
}

nb::object attend(const Handle& handle, const Arguments& given) {
  const int64_t layer = given.integer("layer");
  const Batch sequences = given.batch("sequences");
  const Lengths lengths = given.optional_integers("lengths");
  const Precision precision = precision_of(given);
  const StreamHandle stream = given.stream();
  const NewRows rows = new_rows_of("attend", given["k"], given["v"], handle.open()->config().dtype);
  const Stream queue = stream_of(stream, handle);
  return attended(
      handle, given, ErrorOutput{},
      [&](Cache& cache, const TensorView& query, const TensorView& result, AttendOptions options) {
        options.precision = precision;
        const std::vector<int64_t> tokens = lengths_of("attend", lengths, sequences, query);
        if (!rows.given()) {
          return cache.attend(layer, sequences, tokens, query, result, options, queue);
        }
        cache.attend(layer, sequences, tokens, query, rows.k->view, rows.v->view, result, options,
                     queue);
      });
}

Explanation explain(const Handle& handle, const Arguments& given) {
  const int64_t layer = given.integer("layer");
  const SequenceId sequence = given.integer("sequence");
  const Keywords options(given);
  const StreamHandle stream = given.stream();
  const Borrowed query = borrow("explain", "q", given["q"], handle.open()->config().dtype);
  const Stream queue = stream_of(stream, handle);
  const Attention attention = attention_of("explain", options);
  return unlocked(handle, [&](Cache& cache) {
    return cache.explain(layer, sequence, query.view, attention.options, queue);
  });
}

nb::object read(const Handle& handle, const Arguments& given) {
  const int64_t layer = given.integer("layer");
  const SequenceId sequence = given.integer("sequence");
  const int64_t begin = given.integer("begin"), end = given.integer("end");
  auto out = nb::borrow<nb::object>(given["out"]);
  const StreamHandle stream = given.stream();

  const std::shared_ptr<Cache> cache = handle.open();
  const Config& config = cache->config();
  const Stream queue = stream_of(stream, config);
  // Reading nothing checks the sequence and the layer; the range has to fit before room is made.
  const auto no_rows = [&](int64_t dim) {
    return TensorView::contiguous(nullptr, config.dtype, {0, config.kv_heads, dim}, config.device);
  };
  const int64_t tokens = unlocked(cache, [&](Cache& c) {
    c.read(layer, sequence, 0, no_rows(config.head_dim), no_rows(config.value_dim), queue);
    return c.length(sequence, layer);
  });
  if (begin < 0 || end < begin || end > tokens) {
    throw nb::value_error(("[read] positions: expected a range within 0 to " +
                           std::to_string(tokens) + ", got " + std::to_string(begin) + " to " +
                           std::to_string(end))
                              .c_str());
  }
  if (out.is_none()) {
    const auto array = [&](int64_t dim) {
      return empty_array(nb::make_tuple(end - begin, config.kv_heads, dim), config);
    };
    const nb::object k = array(config.head_dim);
    out = nb::make_tuple(k, array(config.value_dim));
  }
  if (!nb::isinstance<nb::sequence>(out) || nb::len(out) != 2) {
    throw nb::type_error("[read] out: expected a pair of arrays, k and v");
  }
  const nb::object pair = out;
  const Borrowed k = borrow_writable("read", "k", pair[0], config.dtype);
  const Borrowed v = borrow_writable("read", "v", pair[1], config.dtype);
  if (k.view.rank == 0 || k.view.shape[0] != end - begin) {
    throw nb::value_error(("[read] out: expected room for " + std::to_string(end - begin) +
                           " tokens, got " + std::to_string(k.view.rank == 0 ? 0 : k.view.shape[0]))
                              .c_str());
  }
  unlocked(cache, [&](Cache& c) { c.read(layer, sequence, begin, k.view, v.view, queue); });
  return out;
}

// Signatures are spelled out because arrays of every library come in.
#define PKV_SIGNATURE_OPTIONS                          \
  "scale: float | None = None, softcap: float = 0.0, " \
  "sink_bias: pariskv_core._array.Array | None = None"
#define PKV_SIGNATURE_RESULT                                             \
  "out: pariskv_core._array.Array | None = None, " PKV_SIGNATURE_OPTIONS \
  ", return_lse: bool = False, "
#define PKV_SIGNATURE_END "stream: int | None = None) -> typing.Any"

}  // namespace

void bind_calls(nb::class_<Handle>& cache) {
  define(cache,
         {"prefill",
          {"layer", "sequences", "k", "v"},
          {"lengths"},
          {"q", "scale", "softcap", "page_rows", "stream"}},
         &prefill,
         "def prefill(self, layer: int, sequences: " PKV_SIGNATURE_BATCH
         ", "
         "k: pariskv_core._array.Array, v: pariskv_core._array.Array, "
         "lengths: collections.abc.Sequence[int] | None = None, *, "
         "q: pariskv_core._array.Array | None = None, scale: float | None = None, "
         "softcap: float = 0.0, page_rows: collections.abc.Sequence[int] | None = None, "
         "stream: int | None = None) -> list[int] | None",
         R"(Appends keys and values, a prompt or a chunk of one.

k, v     (sum of lengths, kv_heads, head_dim), v value_dim, sequence after sequence; k after RoPE
lengths  tokens of each sequence; may be left out for a single one
q        (sum of lengths, query_heads, head_dim) the prompt's queries, after RoPE: a few early ones
         tell how channels are balanced (ParisKV's block), so that better rows are picked; the
         last ones say which rows HardKV and PRKV keep
scale, softcap
         of these queries, as in decode
page_rows
         (sequences) rows of the page table that are filled for them, see page_table
Returns, with page_rows, the places in `sequences` of those that pages do not serve: some of their
rows are in host memory, or not plain, or the table's rows are too short.)");
  define(cache,
         {"decode",
          {"layer", "sequences", "q"},
          {"k", "v"},
          {"out", "scale", "softcap", "sink_bias", "return_lse", "return_error", "error", "dense",
           "page_rows", "stream"}},
         &decode,
         "def decode(self, layer: int, sequences: " PKV_SIGNATURE_BATCH
         ", "
         "q: pariskv_core._array.Array, k: pariskv_core._array.Array | None = None, "
         "v: pariskv_core._array.Array | None = None, *, " PKV_SIGNATURE_RESULT
         "return_error: bool = False, error: pariskv_core._array.Array | None = None, "
         "dense: collections.abc.Callable[[], object] | None = None, "
         "page_rows: collections.abc.Sequence[int] | None = None, " PKV_SIGNATURE_END,
         R"(Appends one token per sequence, then attends to what matters.

q          (batch, query_heads, head_dim), after RoPE
k, v       (batch, kv_heads, head_dim), v value_dim; left out, nothing is appended: for layers
           that share keys and values with this one
sequences  in slots that are IDLE nothing is read or stored: their output is zeros
out        where to write; a new array of q's library when left out
scale      of q.k, 1 / sqrt(head_dim) when left out
softcap    c > 0: logits become c tanh(logit / c)
sink_bias  (query_heads) float32: a logit without a value row
return_lse, return_error
           what is returned besides
error      (batch, kv_heads) float32: where to write the error in place of a new array; rows of
           sequences that dense attends to are left as they are
dense      with a page table: attends to pages in place of the call, for the sequences whose length
           in the table is not 0, and is called once, when the new rows are there. The call then
           attends for the others. It must not call the cache
page_rows  (batch) with dense: rows of the page table, in order when left out
Returns out, (batch, query_heads, value_dim); or a tuple: out, the log-sum-exps lse, (batch,
query_heads) float32, and the predicted error, (batch, kv_heads) float32. The error is what the
estimate of the keys that are not selected adds to an output, as the rows of its sample tell: its
standard deviation as a share of the spread of values, root mean square over a kv head's query
heads. 0 where nothing is estimated, NaN
where no query is finite. ParisKV has one, with a tail and group_rule "attention_mass".)");
  define(cache,
         {"attend",
          {"layer", "sequences", "q"},
          {"lengths"},
          {"k", "v", "out", "scale", "softcap", "sink_bias", "return_lse", "precision", "stream"}},
         &attend,
         "def attend(self, layer: int, sequences: " PKV_SIGNATURE_BATCH
         ", "
         "q: pariskv_core._array.Array, "
         "lengths: collections.abc.Sequence[int] | None = None, "
         "*, k: pariskv_core._array.Array | None = None, "
         "v: pariskv_core._array.Array | None = None, " PKV_SIGNATURE_RESULT
         "precision: typing.Literal['exact', 'fast'] = 'exact', " PKV_SIGNATURE_END,
         R"(Exact causal attention of the last stored tokens over everything stored.

q        (sum of lengths, query_heads, head_dim): the last tokens of each sequence
lengths  how many each has; may be left out for a single one
k, v     (sum of lengths, kv_heads, head_dim), v value_dim: these tokens are appended first, and
         regions move as if they were decoded one by one; left out, they are stored already
precision
         "fast": weights are rounded to 16 bits before values are added up, as flash attention does;
         each is off by up to 2^-8 of itself in bfloat16, 2^-11 in float16. "exact" adds what
         rounding takes as a second term. In float32, and on the CPU, both are the same
The rest as in decode. Returns out, (sum of lengths, query_heads, value_dim), or (out, lse).)");
  define(cache,
         {"explain", {"layer", "sequence", "q"}, {}, {"scale", "softcap", "sink_bias", "stream"}},
         &explain,
         "def explain(self, layer: int, sequence: int, q: pariskv_core._array.Array, "
         "*, " PKV_SIGNATURE_OPTIONS ", stream: int | None = None) -> Explanation",
         R"(What decode would choose for this query now, and why. Changes nothing.

q  (query_heads, head_dim))");
  define(cache, {"read", {"layer", "sequence", "begin", "end"}, {}, {"out", "stream"}}, &read,
         "def read(self, layer: int, sequence: int, begin: int, end: int, *, "
         "out: tuple[pariskv_core._array.Array, pariskv_core._array.Array] | None = None,"
         " stream: int | None = None) -> typing.Any",
         R"(Copies stored rows out: (k, v), (end - begin, kv_heads, head_dim and value_dim).

NumPy arrays, or torch's from a GPU, or into `out`, a pair; a bfloat16 cache on the CPU needs
`out`.)");
}

}  // namespace pariskv::python
