// Cache.save and Cache.load.
#include <string>

#include "handle.h"
#include "paths.h"

namespace pariskv::python {

void bind_files(nb::class_<Handle>& cache) {
  define(
      cache, {"save", {"sequence", "path"}, {}, {}},
      [](Handle& self, const Arguments& given) {
        const SequenceId sequence = given.integer("sequence");
        const std::string file = path_of("save", given["path"]);
        unlocked(self, [&](Cache& c) { c.save(sequence, file); });
      },
      "def save(self, sequence: int, "
      "path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None",
      R"(Writes a sequence to a file, with a checksum for each part. Changes nothing.

An older file is replaced when the disk has all of the new one, or not at all. Its mode, owner and
access list are kept; a link is followed. Raises OSError for what the system refuses: a full disk, a
folder that is not there.)");
  define(
      cache, {"load", {"path"}, {}, {"stream"}},
      [](Handle& self, const Arguments& given) {
        const std::string file = path_of("load", given["path"]);
        const Stream queue = stream_of(given.stream(), self);
        return unlocked(self, [&](Cache& c) { return c.load(file, queue); });
      },
      "def load(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, "
      "stream: int | None = None) -> int",
      R"(A new sequence, equal to the one that was saved: what follows gives the same bits.

The file may come from another device, and from a cache with another search, other windows and
budgets. Raises ValueError for a file that is damaged or of another model, policy or version, and
then adds nothing.)");
}

}  // namespace pariskv::python
