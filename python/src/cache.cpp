// Cache: unwrap the arrays, drop the GIL, call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "handle.h"
#include "module.h"

namespace pariskv::python {

namespace {

using Ids = std::vector<SequenceId>;
using Lengths = std::optional<std::vector<int64_t>>;

/** What each sequence has; may be left out when there is one sequence to have it all. */
std::vector<int64_t> lengths_of(const char* verb, const Lengths& lengths, const Ids& sequences,
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

/** A number for each sequence, or one for all of them. */
using Counts = std::optional<std::variant<int64_t, std::vector<int64_t>>>;

Cut cut_of(const Counts& drop, const Counts& keep, const Ids& sequences) {
  if (drop.has_value() == keep.has_value()) {
    throw nb::value_error("[truncate] expected one of drop and keep");
  }
  const auto& counts = drop ? *drop : *keep;
  const int64_t* one = std::get_if<int64_t>(&counts);
  std::vector<int64_t> tokens = one != nullptr ? std::vector<int64_t>(sequences.size(), *one)
                                               : std::get<std::vector<int64_t>>(counts);
  return drop ? Cut::drop(std::move(tokens)) : Cut::keep(std::move(tokens));
}

/** The keyword arguments that decode, attend and explain share. */
struct Keywords {
  std::optional<double> scale;
  double softcap;
  nb::object sink_bias;
};

struct Attention {
  AttendOptions options;
  Borrowed sink_bias, lse;
  nb::object lse_array;
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

/** Queries in, output out: what decode and attend do alike. */
template <typename Call>
nb::object attended(const char* verb, const Handle& handle, nb::handle q, nb::object out,
                    const Keywords& keywords, bool return_lse, Call call) {
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
  if (return_lse) {
    attention.lse_array =
        empty_like(q, nb::make_tuple(tokens, config.query_heads), DType::kFloat32);
    attention.lse = borrow_writable(verb, "lse", attention.lse_array, DType::kFloat32);
    attention.options.lse = attention.lse.view;
  }
  unlocked(cache, [&](Cache& open) { call(open, query.view, result.view, attention.options); });
  if (return_lse) return nb::make_tuple(out, attention.lse_array);
  return out;
}

void prefill(const Handle& handle, int64_t layer, const Ids& sequences, nb::handle k, nb::handle v,
             const Lengths& lengths, nb::handle q, std::optional<double> scale, double softcap,
             const StreamHandle& stream) {
  const DType dtype = handle.open()->config().dtype;
  const Borrowed keys = borrow("prefill", "k", k, dtype);
  const Borrowed values = borrow("prefill", "v", v, dtype);
  std::optional<Borrowed> queries;
  PrefillOptions options;
  options.scale = scale;
  options.softcap = softcap;
  if (!q.is_none()) {
    queries.emplace(borrow("prefill", "q", q, dtype));
    options.q = queries->view;
  }
  const std::vector<int64_t> tokens = lengths_of("prefill", lengths, sequences, keys.view);
  const Stream queue = stream_of(stream, handle);
  unlocked(handle, [&](Cache& cache) {
    cache.prefill(layer, sequences, tokens, keys.view, values.view, options, queue);
  });
}

nb::object decode(const Handle& handle, int64_t layer, const Ids& sequences, nb::handle q,
                  nb::handle k, nb::handle v, nb::object out, std::optional<double> scale,
                  double softcap, nb::object sink_bias, bool return_lse,
                  const StreamHandle& stream) {
  const DType dtype = handle.open()->config().dtype;
  const NewRows rows = new_rows_of("decode", k, v, dtype);
  const Stream queue = stream_of(stream, handle);
  return attended(
      "decode", handle, q, std::move(out), {scale, softcap, std::move(sink_bias)}, return_lse,
      [&](Cache& cache, const TensorView& query, const TensorView& result,
          const AttendOptions& options) {
        if (!rows.given()) return cache.decode(layer, sequences, query, result, options, queue);
        cache.decode(layer, sequences, query, rows.k->view, rows.v->view, result, options, queue);
      });
}

nb::object attend(const Handle& handle, int64_t layer, const Ids& sequences, nb::handle q,
                  const Lengths& lengths, nb::handle k, nb::handle v, nb::object out,
                  std::optional<double> scale, double softcap, nb::object sink_bias,
                  bool return_lse, const StreamHandle& stream) {
  const NewRows rows = new_rows_of("attend", k, v, handle.open()->config().dtype);
  const Stream queue = stream_of(stream, handle);
  return attended(
      "attend", handle, q, std::move(out), {scale, softcap, std::move(sink_bias)}, return_lse,
      [&](Cache& cache, const TensorView& query, const TensorView& result,
          const AttendOptions& options) {
        const std::vector<int64_t> tokens = lengths_of("attend", lengths, sequences, query);
        if (!rows.given()) {
          return cache.attend(layer, sequences, tokens, query, result, options, queue);
        }
        cache.attend(layer, sequences, tokens, query, rows.k->view, rows.v->view, result, options,
                     queue);
      });
}

Explanation explain(const Handle& handle, int64_t layer, SequenceId sequence, nb::handle q,
                    std::optional<double> scale, double softcap, nb::object sink_bias,
                    const StreamHandle& stream) {
  const Borrowed query = borrow("explain", "q", q, handle.open()->config().dtype);
  const Stream queue = stream_of(stream, handle);
  const Attention attention = attention_of("explain", {scale, softcap, std::move(sink_bias)});
  return unlocked(handle, [&](Cache& cache) {
    return cache.explain(layer, sequence, query.view, attention.options, queue);
  });
}

nb::object read(const Handle& handle, int64_t layer, SequenceId sequence, int64_t begin,
                int64_t end, nb::object out, const StreamHandle& stream) {
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
#define PKV_SIGNATURE_OPTIONAL_RESULT                                    \
  "out: pariskv_core._array.Array | None = None, " PKV_SIGNATURE_OPTIONS \
  ", return_lse: bool = False, stream: int | None = None) -> typing.Any"
#define PKV_SIGNATURE_RESULT "*, " PKV_SIGNATURE_OPTIONAL_RESULT

}  // namespace

void bind_cache(nb::module_& m) {
  using namespace nb::literals;
  // Arrays admit None here so that what refuses it is the sentence in borrow.
  nb::class_<Handle> cache(m, "Cache", R"(The KV cache of one model: all layers, all sequences.

Calls on one cache take turns; calls on different caches run side by side, without the GIL.
Arrays are anything that speaks DLPack, in the config's dtype, rows without gaps. An error
leaves the cache as it was.

On a GPU calls enqueue their work on `stream`, a cudaStream_t as an integer, and return; left out,
it is PyTorch's current stream, or the default one. Arrays must stay as they are until that work
is done.)");
  cache.def(nb::init<const Config&>(), "config"_a)
      .def_prop_ro("config", [](const Handle& self) { return self.open()->config(); })
      .def("close", &Handle::close, "Frees everything; later calls raise ValueError.")
      .def(
          "__enter__",
          [](nb::object self) {
            nb::cast<Handle&>(self).open();
            return self;
          },
          nb::sig("def __enter__(self) -> Cache"))
      .def(
          "__exit__", [](Handle& self, nb::args) { self.close(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def(
          "add", [](Handle& self) { return unlocked(self, [](Cache& c) { return c.add(); }); },
          "A new, empty sequence: its name, never used again.")
      .def(
          "remove",
          [](Handle& self, SequenceId sequence, const StreamHandle& stream) {
            const Stream queue = stream_of(stream, self);
            unlocked(self, [&](Cache& c) { c.remove(sequence, queue); });
          },
          "sequence"_a, nb::kw_only(), "stream"_a = nb::none(),
          "Forgets a sequence: its bytes are zeroed and given back.")
      .def(
          "fork",
          [](Handle& self, SequenceId sequence, const StreamHandle& stream) {
            const Stream queue = stream_of(stream, self);
            return unlocked(self, [&](Cache& c) { return c.fork(sequence, queue); });
          },
          "sequence"_a, nb::kw_only(), "stream"_a = nb::none(),
          "A new sequence equal to this one; storage is shared until one changes.")
      .def(
          "reorder",
          [](Handle& self, const Ids& sequences, const std::vector<int64_t>& source,
             const StreamHandle& stream) {
            const Stream queue = stream_of(stream, self);
            unlocked(self, [&](Cache& c) { c.reorder(sequences, source, queue); });
          },
          "sequences"_a, "source"_a, nb::kw_only(), "stream"_a = nb::none(),
          "Beam reordering: sequences[i] becomes what sequences[source[i]] was.")
      .def(
          "truncate",
          [](Handle& self, const Ids& sequences, const Counts& drop, const Counts& keep,
             const StreamHandle& stream) {
            const Cut cut = cut_of(drop, keep, sequences);
            const Stream queue = stream_of(stream, self);
            unlocked(self, [&](Cache& c) { c.truncate(sequences, cut, queue); });
          },
          "sequences"_a, nb::kw_only(), "drop"_a = nb::none(), "keep"_a = nb::none(),
          "stream"_a = nb::none(),
          nb::sig("def truncate(self, sequences: collections.abc.Sequence[int], *, "
                  "drop: int | collections.abc.Sequence[int] | None = None, "
                  "keep: int | collections.abc.Sequence[int] | None = None, "
                  "stream: int | None = None) -> None"),
          R"(Drops the last tokens of each sequence in every layer, also across a flush.

drop  how many go, one number for each sequence or one for all
keep  how many stay instead: in every layer, whatever its length)")
      .def(
          "flush",
          [](Handle& self, const std::optional<Ids>& sequences, const StreamHandle& stream) {
            const Stream queue = stream_of(stream, self);
            unlocked(self,
                     [&](Cache& c) { c.flush(sequences ? *sequences : c.sequences(), queue); });
          },
          "sequences"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
          "Moves everything older than the local window to the retrieval zone.")
      .def("prefill", &prefill, "layer"_a, "sequences"_a, "k"_a.none(), "v"_a.none(),
           "lengths"_a = nb::none(), nb::kw_only(), "q"_a = nb::none(), "scale"_a = nb::none(),
           "softcap"_a = 0.0, "stream"_a = nb::none(),
           nb::sig("def prefill(self, layer: int, sequences: collections.abc.Sequence[int], "
                   "k: pariskv_core._array.Array, v: pariskv_core._array.Array, "
                   "lengths: collections.abc.Sequence[int] | None = None, *, "
                   "q: pariskv_core._array.Array | None = None, scale: float | None = None, "
                   "softcap: float = 0.0, stream: int | None = None) -> None"),
           R"(Appends keys and values, a prompt or a chunk of one.

k, v     (sum of lengths, kv_heads, head_dim), v value_dim, sequence after sequence; k after RoPE
lengths  tokens of each sequence; may be left out for a single one
q        (sum of lengths, query_heads, head_dim) the prompt's queries, after RoPE: a few early ones
         tell how channels are balanced (ParisKV's block), so that better rows are picked; the
         last ones say which rows HardKV and PRKV keep
scale, softcap
         of these queries, as in decode)")
      .def("decode", &decode, "layer"_a, "sequences"_a, "q"_a.none(), "k"_a = nb::none(),
           "v"_a = nb::none(), nb::kw_only(), "out"_a = nb::none(), "scale"_a = nb::none(),
           "softcap"_a = 0.0, "sink_bias"_a = nb::none(), "return_lse"_a = false,
           "stream"_a = nb::none(),
           nb::sig("def decode(self, layer: int, sequences: collections.abc.Sequence[int], "
                   "q: pariskv_core._array.Array, k: pariskv_core._array.Array | None = None, "
                   "v: pariskv_core._array.Array | None = None, " PKV_SIGNATURE_RESULT),
           R"(Appends one token per sequence, then attends to what matters.

q          (batch, query_heads, head_dim), after RoPE
k, v       (batch, kv_heads, head_dim), v value_dim; left out, nothing is appended: for layers
           that share keys and values with this one
out        where to write; a new array of q's library when left out
scale      of q.k, 1 / sqrt(head_dim) when left out
softcap    c > 0: logits become c tanh(logit / c)
sink_bias  (query_heads) float32: a logit without a value row
Returns out, (batch, query_heads, value_dim), or (out, lse) with the log-sum-exps,
(batch, query_heads) float32.)")
      .def(
          "advance",
          [](Handle& self, const Ids& sequences, const StreamHandle& stream) {
            const Stream queue = stream_of(stream, self);
            unlocked(self, [&](Cache& c) { c.advance(sequences, queue); });
          },
          "sequences"_a, nb::kw_only(), "stream"_a = nb::none(),
          R"(Makes room for the next replay of a captured graph of decode calls.

A decode that is called while its stream is captured changes nothing; what it recorded decodes,
each time it runs, one token of the sequences last named here, in this order. So: capture once,
then for every token advance(batch) and replay. For caches on a GPU.)")
      .def("attend", &attend, "layer"_a, "sequences"_a, "q"_a.none(), "lengths"_a = nb::none(),
           nb::kw_only(), "k"_a = nb::none(), "v"_a = nb::none(), "out"_a = nb::none(),
           "scale"_a = nb::none(), "softcap"_a = 0.0, "sink_bias"_a = nb::none(),
           "return_lse"_a = false, "stream"_a = nb::none(),
           nb::sig("def attend(self, layer: int, sequences: collections.abc.Sequence[int], "
                   "q: pariskv_core._array.Array, "
                   "lengths: collections.abc.Sequence[int] | None = None, "
                   "*, k: pariskv_core._array.Array | None = None, "
                   "v: pariskv_core._array.Array | None = None, " PKV_SIGNATURE_OPTIONAL_RESULT),
           R"(Exact causal attention of the last stored tokens over everything stored.

q        (sum of lengths, query_heads, head_dim): the last tokens of each sequence
lengths  how many each has; may be left out for a single one
k, v     (sum of lengths, kv_heads, head_dim), v value_dim: these tokens are appended first, and
         regions move as if they were decoded one by one; left out, they are stored already
The rest, and what is returned, as in decode.)")
      .def("explain", &explain, "layer"_a, "sequence"_a, "q"_a.none(), nb::kw_only(),
           "scale"_a = nb::none(), "softcap"_a = 0.0, "sink_bias"_a = nb::none(),
           "stream"_a = nb::none(),
           nb::sig("def explain(self, layer: int, sequence: int, q: pariskv_core._array.Array, "
                   "*, " PKV_SIGNATURE_OPTIONS ", stream: int | None = None) -> Explanation"),
           R"(What decode would choose for this query now, and why. Changes nothing.

q  (query_heads, head_dim))")
      .def(
          "summaries",
          [](const Handle& self, int64_t layer, SequenceId sequence) {
            return unlocked(self, [&](Cache& c) { return c.summaries(layer, sequence); });
          },
          "layer"_a, "sequence"_a, "The key summaries of a retrieval zone, unpacked.")
      .def("read", &read, "layer"_a, "sequence"_a, "begin"_a, "end"_a, nb::kw_only(),
           "out"_a = nb::none(), "stream"_a = nb::none(),
           nb::sig("def read(self, layer: int, sequence: int, begin: int, end: int, *, "
                   "out: tuple[pariskv_core._array.Array, pariskv_core._array.Array] | None = None,"
                   " stream: int | None = None) -> typing.Any"),
           R"(Copies stored rows out: (k, v), (end - begin, kv_heads, head_dim and value_dim).

NumPy arrays, or torch's from a GPU, or into `out`, a pair; a bfloat16 cache on the CPU needs
`out`.)")
      .def(
          "length",
          [](const Handle& self, SequenceId sequence, int64_t layer) {
            return unlocked(self, [&](Cache& c) { return c.length(sequence, layer); });
          },
          "sequence"_a, "layer"_a = 0, "Tokens of a sequence in one layer.")
      .def(
          "regions",
          [](const Handle& self, SequenceId sequence, int64_t layer) {
            return unlocked(self, [&](Cache& c) { return c.regions(sequence, layer); });
          },
          "sequence"_a, "layer"_a = 0, "How many tokens lie in each region.")
      .def(
          "sequences",
          [](const Handle& self) { return unlocked(self, [](Cache& c) { return c.sequences(); }); },
          "The sequences there are, oldest first.")
      .def(
          "stats",
          [](const Handle& self) { return unlocked(self, [](Cache& c) { return c.stats(); }); },
          "What the cache holds and has done.")
      .def(
          "trim", [](Handle& self) { unlocked(self, [](Cache& c) { c.trim(); }); },
          "Gives memory that nothing uses back to the device and the system; waits for the "
          "device.");
  bind_files(cache);
}

}  // namespace pariskv::python
