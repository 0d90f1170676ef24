// Cache: its life, its sequences, and what it says of itself.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "fields.h"
#include "handle.h"
#include "module.h"

namespace pariskv::python {

namespace {

Cut cut_of(const Arguments& given, const Batch& sequences) {
  if (given["drop"].is_none() == given["keep"].is_none()) {
    throw nb::value_error("[truncate] expected one of drop and keep");
  }
  if (auto drop = given.integer_or_integers("drop", size_t(sequences.size()))) {
    return Cut::drop(std::move(*drop));
  }
  return Cut::keep(*given.integer_or_integers("keep", size_t(sequences.size())));
}

const Config& config_of(const Arguments& given) {
  const nb::handle config = given["config"];
  if (!nb::isinstance<Config>(config)) refuse_type("[cache] config", "a Config", config);
  return nb::cast<const Config&>(config);
}

/** Its shape and how many sequences it has; a cache that cannot be asked still prints itself. */
std::string text_of_cache(const Handle& self) {
  std::shared_ptr<Cache> cache;
  try {
    cache = self.open();
  } catch (const nb::builtin_exception&) {
    return "Cache(closed)";
  }
  const Config& config = cache->config();
  nb::dict fields;
  try {
    fields["sequences"] = unlocked(cache, [](Cache& c) { return c.sequences().size(); });
  } catch (const std::invalid_argument&) {  // in a child of fork, whose parent was inside a call
    fields["sequences"] = nb::none();
  }
  fields["layers"] = config.layers;
  fields["query_heads"] = config.query_heads;
  fields["kv_heads"] = config.kv_heads;
  fields["head_dim"] = config.head_dim;
  fields["dtype"] = name_of(config.dtype);
  fields["device"] = name_of(config.device);
  return text_of_fields("Cache", fields);
}

void bind_life(nb::class_<Handle>& cache) {
  static const Parameters parameters("cache", {"config"}, {}, {});
  cache
      .def(
          "__init__",
          [](Handle* self, const nb::args& positional, const nb::kwargs& keywords) {
            new (self) Handle(config_of(Arguments(parameters, positional, keywords)));
          },
          nb::sig("def __init__(self, config: Config) -> None"))
      .def_prop_ro("config", [](const Handle& self) { return self.open()->config(); })
      .def("__repr__", &text_of_cache)
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
          nb::sig("def __exit__(self, *args: object) -> None"));
}

void bind_sequences(nb::class_<Handle>& cache) {
  cache.def(
      "add", [](Handle& self) { return unlocked(self, [](Cache& c) { return c.add(); }); },
      "A new, empty sequence: its name, never used again.");
  define(
      cache, {"batch", {"sequences"}, {}, {}},
      [](Handle& self, const Arguments& given) {
        std::vector<SequenceId> sequences = given.integers("sequences");
        return unlocked(self, [&](Cache& c) { return c.batch(std::move(sequences)); });
      },
      "def batch(self, sequences: collections.abc.Sequence[int]) -> Batch",
      R"(Looks sequences up once: calls take the batch in place of the list.

It stays good while other sequences come and go. With one of its own removed, and in another cache,
calls raise ValueError.)");
  define(
      cache, {"remove", {"sequence"}, {}, {"stream"}},
      [](Handle& self, const Arguments& given) {
        const SequenceId sequence = given.integer("sequence");
        const Stream queue = stream_of(given.stream(), self);
        unlocked(self, [&](Cache& c) { c.remove(sequence, queue); });
      },
      "def remove(self, sequence: int, *, stream: int | None = None) -> None",
      "Forgets a sequence: its bytes are zeroed and given back.");
  define(
      cache, {"fork", {"sequence"}, {}, {"tokens", "stream"}},
      [](Handle& self, const Arguments& given) {
        const SequenceId sequence = given.integer("sequence");
        const bool whole = given["tokens"].is_none();
        const int64_t tokens = whole ? 0 : given.integer("tokens");
        const Stream queue = stream_of(given.stream(), self);
        return unlocked(self, [&](Cache& c) {
          return whole ? c.fork(sequence, queue) : c.fork_prefix(sequence, tokens, queue);
        });
      },
      "def fork(self, sequence: int, *, tokens: int | None = None, stream: int | None = None) "
      "-> int",
      R"(A new sequence equal to this one; storage is shared until one changes.

tokens  the first so many alone, in every layer: 1 or more, and at most those of the shortest
        layer. As fork and then truncate(keep=tokens), without memory for what is cut off.)");
  define(
      cache, {"reorder", {"sequences", "source"}, {}, {"stream"}},
      [](Handle& self, const Arguments& given) {
        const Batch sequences = given.batch("sequences");
        const std::vector<int64_t> source = given.integers("source");
        const Stream queue = stream_of(given.stream(), self);
        unlocked(self, [&](Cache& c) { c.reorder(sequences, source, queue); });
      },
      "def reorder(self, sequences: " PKV_SIGNATURE_BATCH
      ", "
      "source: collections.abc.Sequence[int], *, stream: int | None = None) -> None",
      "Beam reordering: sequences[i] becomes what sequences[source[i]] was.");
  define(
      cache, {"truncate", {"sequences"}, {}, {"drop", "keep", "stream"}},
      [](Handle& self, const Arguments& given) {
        const Batch sequences = given.batch("sequences");
        const Cut cut = cut_of(given, sequences);
        const Stream queue = stream_of(given.stream(), self);
        unlocked(self, [&](Cache& c) { c.truncate(sequences, cut, queue); });
      },
      "def truncate(self, sequences: " PKV_SIGNATURE_BATCH
      ", *, "
      "drop: int | collections.abc.Sequence[int] | None = None, "
      "keep: int | collections.abc.Sequence[int] | None = None, "
      "stream: int | None = None) -> None",
      R"(Drops the last tokens of each sequence in every layer, also across a flush.

drop  how many go, one number for each sequence or one for all
keep  how many stay instead: in every layer, whatever its length)");
  define(
      cache, {"flush", {}, {"sequences"}, {"stream"}},
      [](Handle& self, const Arguments& given) {
        const bool all = given["sequences"].is_none();
        const Batch sequences = all ? Batch({}) : given.batch("sequences");
        const Stream queue = stream_of(given.stream(), self);
        unlocked(self, [&](Cache& c) {
          if (all) return c.flush_all(queue);
          c.flush(sequences, queue);
        });
      },
      "def flush(self, sequences: " PKV_SIGNATURE_BATCH
      " | None = None, *, "
      "stream: int | None = None) -> None",
      R"(Moves everything older than the local window to the retrieval zone.

All layers of all these sequences are flushed, or none if anything fails.)");
  define(
      cache, {"advance", {"sequences"}, {}, {"stream"}},
      [](Handle& self, const Arguments& given) {
        const Batch sequences = given.batch("sequences");
        const Stream queue = stream_of(given.stream(), self);
        unlocked(self, [&](Cache& c) { c.advance(sequences, queue); });
      },
      "def advance(self, sequences: " PKV_SIGNATURE_BATCH
      ", *, "
      "stream: int | None = None) -> None",
      R"(Makes room for the next replay of a captured graph of decode calls.

A decode that is called while its stream is captured changes nothing; what it recorded decodes,
each time it runs, one token of the sequences last named here, in this order. So: capture once,
then for every token advance(batch) and replay. Slots of the graph beyond them are idle, as are those
named IDLE here, whatever they were when it was captured: their output is zeros. So one graph per
size serves any sequences. For caches on a GPU.)");
}

void bind_looks(nb::class_<Handle>& cache) {
  define(
      cache, {"summaries", {"layer", "sequence"}, {}, {}},
      [](Handle& self, const Arguments& given) {
        const int64_t layer = given.integer("layer");
        const SequenceId sequence = given.integer("sequence");
        return unlocked(self, [&](Cache& c) { return c.summaries(layer, sequence); });
      },
      "def summaries(self, layer: int, sequence: int) -> Summaries",
      "The key summaries of a retrieval zone, unpacked.");
  define(
      cache, {"length", {"sequence"}, {"layer"}, {}},
      [](Handle& self, const Arguments& given) {
        const SequenceId sequence = given.integer("sequence");
        const int64_t layer = given.integer("layer", 0);
        return unlocked(self, [&](Cache& c) { return c.length(sequence, layer); });
      },
      "def length(self, sequence: int, layer: int = 0) -> int",
      "Tokens of a sequence in one layer.");
  define(
      cache, {"regions", {"sequence"}, {"layer"}, {}},
      [](Handle& self, const Arguments& given) {
        const SequenceId sequence = given.integer("sequence");
        const int64_t layer = given.integer("layer", 0);
        return unlocked(self, [&](Cache& c) { return c.regions(sequence, layer); });
      },
      "def regions(self, sequence: int, layer: int = 0) -> Regions",
      "How many tokens lie in each region.");
  define(
      cache, {"reserve", {"tokens"}, {"sequences"}, {}},
      [](Handle& self, const Arguments& given) {
        const int64_t tokens = given.integer("tokens");
        const int64_t sequences = given.integer("sequences", 1);
        unlocked(self, [&](Cache& c) { c.reserve(tokens, sequences); });
      },
      "def reserve(self, tokens: int, sequences: int = 1) -> None",
      R"(Takes memory for so many tokens of so many new sequences ahead of them.

Its pages are brought into memory, on several threads: then prompts go to host memory at the bus's
rate from the first one on. Takes nothing where as much is free already. Raises OutOfMemory where a
budget has no room for it. The memory stays when sequences go, until trim, close, or need of memory
of another kind.)");
  define(
      cache, {"reserve_device", {"bytes"}, {}, {}},
      [](Handle& self, const Arguments& given) {
        const int64_t bytes = given.integer("bytes");
        unlocked(self, [&](Cache& c) { c.reserve_device(bytes); });
      },
      "def reserve_device(self, bytes: int) -> None",
      R"(Takes so many bytes of a GPU's memory now, for whatever comes.

A GPU maps memory for some 30 microseconds a megabyte, which no prompt has to wait for then. It stays
until trim or close, and counts as reserved once it is used. Raises OutOfMemory, and has taken
nothing, where memory_budget or the GPU has less; ValueError on a CPU.)");
  define(
      cache, {"reserve_host", {"bytes"}, {"background"}, {}},
      [](Handle& self, const Arguments& given) {
        const int64_t bytes = given.integer("bytes");
        const bool background = given.flag("background");
        unlocked(self, [&](Cache& c) { c.reserve_host(bytes, background); });
      },
      "def reserve_host(self, bytes: int, background: bool = False) -> None",
      R"(Takes so many bytes of host memory for rows that leave a GPU.

With background=True a thread takes them meanwhile, 16 MB at a time: they count as reserved at once,
and a prompt that needs one first waits for that alone. Raises OutOfMemory, and has taken nothing, where
host_budget has no room; ValueError where rows are never in host memory. The memory stays as that of
reserve does.)");
  cache
      .def(
          "sequences",
          [](const Handle& self) { return unlocked(self, [](Cache& c) { return c.sequences(); }); },
          "The sequences there are, oldest first.")
      .def(
          "stats",
          [](const Handle& self, bool counted) {
            const auto scope = counted ? StatsScope::kCounted : StatsScope::kAll;
            return unlocked(self, [&](Cache& c) { return c.stats(scope); });
          },
          nb::arg("counted") = false,
          R"(What the cache holds and has done.

counted: leave out what each sequence has to be asked for, which takes long on a GPU with many of
them: tokens, kept_rows, dropped_rows and unusable_keys are 0 then.)")
      .def(
          "trim", [](Handle& self) { unlocked(self, [](Cache& c) { c.trim(); }); },
          "Gives memory that nothing uses back to the device and the system; waits for the "
          "device.");
}

}  // namespace

void bind_cache(nb::module_& m) {
  m.attr("IDLE") = kIdle;
  nb::class_<Batch>(m, "Batch", R"(Sequences that were looked up once; see Cache.batch.)")
      .def_prop_ro("ids", &Batch::ids, "The sequences, in order.")
      .def("__len__", &Batch::size)
      .def("__repr__", [](const Batch& self) {
        std::string text = "Batch([";
        for (const SequenceId id : self.ids()) {
          text += (text.back() == '[' ? "" : ", ") + (id == kIdle ? "IDLE" : std::to_string(id));
        }
        return text + "])";
      });
  nb::class_<Handle> cache(m, "Cache", R"(The KV cache of one model: all layers, all sequences.

Calls on one cache take turns; calls on different caches run side by side, without the GIL.
Arrays are anything that speaks DLPack, in the config's dtype, rows without gaps. An error
leaves the cache as it was, and so does Ctrl-C, which a long call on the main thread answers at
once: only `out`, `lse` and `error` may hold a part of what was being written.

After os.fork the child may go on using a cache on the CPU. If another thread was inside a call on
it at that moment, the child's calls raise ValueError.

On a GPU calls enqueue their work on `stream`, a cudaStream_t as an integer, and return; left out,
it is PyTorch's current stream, or the default one. Arrays must stay as they are until that work
is done.)");
  bind_life(cache);
  bind_sequences(cache);
  bind_calls(cache);
  bind_looks(cache);
  bind_files(cache);
  bind_pages(m, cache);
}

}  // namespace pariskv::python
