// Cache::save and Cache::load: pieces of a sequence to a file and back.
#include <algorithm>
#include <cstring>
#include <memory>

#include "cache_impl.h"
#include "saved/checksum.h"
#include "saved/file.h"
#include "saved/format.h"
#include "saved/settings.h"

namespace pariskv {

/** One layer in an open file. */
struct SavedPart {
  const OldFile& file;
  const SavedHeader& header;
  const std::vector<Piece>& pieces;
  int64_t layer;
};

namespace {

/** Bytes that lie side by side, here and in the file. */
struct Run {
  char* data;  // null: rows that were given back, which are zeros in a file
  int64_t bytes;
};

/** The rows of a piece, head by head; a block has some of a segment's tokens, or all. */
std::vector<Run> runs_of_rows(const Piece& piece, void* const* table, int64_t tokens,
                              const RowFormat& rows, const ModelShape& shape) {
  const int64_t first = piece.segment * shape.segment_tokens;
  if (tokens == shape.segment_tokens && piece.end - piece.begin == tokens) {
    return {{static_cast<char*>(table[piece.segment]), piece.bytes}};
  }
  std::vector<Run> runs;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (int64_t slot = piece.begin, count = 0; slot < piece.end; slot += count) {
      const int64_t block = (first + slot) / tokens, at = (first + slot) % tokens;
      count = std::min(piece.end - slot, tokens - at);
      char* data = static_cast<char*>(table[block]);
      if (data != nullptr) data += (head * tokens + at) * rows.bytes();
      runs.push_back({data, count * rows.bytes()});
    }
  }
  return runs;
}

/** The memory of a piece, in the order of the file. */
std::vector<Run> runs_of(const Piece& piece, const SequenceView& view, const ModelShape& shape) {
  switch (piece.kind) {
    case Piece::Kind::kState:
      return {{view[Part::kState], piece.bytes}};
    case Piece::Kind::kSummaries:
      return {{reinterpret_cast<char*>(view.summaries[piece.segment]), piece.bytes}};
    case Piece::Kind::kRows:
      return runs_of_rows(piece, view.rows, shape.layout.tokens, shape.rows, shape);
    case Piece::Kind::kNarrowRows:
      return runs_of_rows(piece, view.narrow_rows, shape.narrow_layout.tokens, shape.narrow, shape);
  }
  return {};
}

/** Zeroes the plain rows of a zone that is narrow, in a copy of a piece: nothing reads them. */
void clear_narrow(const Piece& piece, const SequenceView& view, const ModelShape& shape,
                  char* copy) {
  const int64_t first = piece.segment * shape.segment_tokens, row = shape.rows.bytes();
  const int64_t begin = std::max(view.zone_begin - first, piece.begin);
  const int64_t end = std::min(view.zone_end - first, piece.end);
  for (int64_t head = 0; head < shape.kv_heads && begin < end; ++head) {
    std::memset(copy + (head * piece.end + begin) * row, 0, size_t((end - begin) * row));
  }
}

std::unique_ptr<char[]> buffer_of(int64_t bytes) {
  return std::unique_ptr<char[]>(new char[size_t(bytes)]);
}

SavedSizes sizes_of(const ModelShape& shape, const RegionSizes& regions, const Search& search,
                    int64_t version) {
  // Where a zone opened follows from `dense_below`, which may have been another. Narrow rows are
  // searched from the first one on.
  RegionSizes known = regions;
  if (!shape.narrows()) known.opening = 0;
  const bool based = shape.narrow_base.any();  // which ends a state
  return {known,
          shape.segment_tokens,
          shape.kv_heads * shape.rows.bytes(),
          search.needs().summary_bytes,
          version < kBasedVersion && based ? shape.narrow_base.based : search.needs().state_bytes,
          search.needs().observed,
          shape.kv_heads * shape.narrow.bytes()};
}

/** Calls `work(i)` for every piece of a layer, on the threads of the backend. */
template <typename Work>
void each_piece(Backend& backend, const StopCheck& stop, const std::vector<Piece>& pieces,
                int64_t layer, Work work) {
  const auto before = [](const Piece& piece, int64_t l) { return piece.layer < l; };
  const auto at = [&](int64_t l) {
    return std::lower_bound(pieces.begin(), pieces.end(), l, before) - pieces.begin();
  };
  const int64_t first = at(layer);
  const bool alone = backend.capabilities().own_memory;  // no threads that would ask by themselves
  backend.parallel_for(at(layer + 1) - first, [&](int64_t i) {
    if (alone) stop.check();
    work(size_t(first + i));
  });
}

/** Writes a piece; returns its checksum. */
uint64_t write_piece(const Piece& piece, const Layer& layer, const SequenceView& view,
                     const ModelShape& shape, const Search& search, Backend& backend, int64_t begin,
                     NewFile& file) {
  const bool rows = piece.kind == Piece::Kind::kRows;
  const bool narrow = piece.kind == Piece::Kind::kNarrowRows;
  const LayerStore& store = narrow ? layer.narrow : layer.store;
  const bool readable = !backend.capabilities().own_memory ||
                        ((rows || narrow) && store.row_block(piece.segment)->offloaded());
  const bool part =
      piece.kind == Piece::Kind::kSummaries && piece.end - piece.begin < shape.segment_tokens;
  const bool mixed = rows && shape.narrows();
  const std::vector<Run> runs = runs_of(piece, view, shape);
  std::unique_ptr<char[]> copy;
  const char* data = runs[0].data;
  if (!readable || part || mixed || runs.size() > 1) {
    copy = buffer_of(piece.bytes);
    char* next = copy.get();
    for (const Run& run : runs) {
      if (run.data == nullptr) {
        std::memset(next, 0, size_t(run.bytes));
      } else if (readable) {
        std::memcpy(next, run.data, size_t(run.bytes));
      } else {
        backend.fetch(next, run.data, run.bytes);
      }
      next += run.bytes;
    }
    if (part) {
      search.clear_outside(reinterpret_cast<uint8_t*>(copy.get()), piece.begin, piece.end);
    }
    if (mixed) clear_narrow(piece, view, shape, copy.get());
    data = copy.get();
  }
  file.write(data, piece.bytes, begin + piece.offset);
  return checksum_of(data, piece.bytes);
}

/** Reads a piece to where the view has it. */
void read_piece(const SavedPart& part, size_t number, const SequenceView& view,
                const ModelShape& shape, Backend& backend, Stream stream) {
  const Piece& piece = part.pieces[number];
  const std::vector<Run> runs = runs_of(piece, view, shape);
  const bool in_place = !backend.capabilities().own_memory && runs.size() == 1;
  const std::unique_ptr<char[]> copy = in_place ? nullptr : buffer_of(piece.bytes);
  char* data = in_place ? runs[0].data : copy.get();
  part.file.read(data, piece.bytes, part.header.bytes() + piece.offset);
  if (checksum_of(data, piece.bytes) != part.header.checksums[number]) {
    const char* names[] = {"state", "rows", "summaries", "narrow rows"};
    refuse_damaged(part.file, std::string("the checksum of its ") + names[int(piece.kind)] +
                                  " of layer " + std::to_string(piece.layer) + ", segment " +
                                  std::to_string(piece.segment) + ", is another one");
  }
  if (in_place) return;
  const char* next = copy.get();
  for (const Run& run : runs) {
    if (run.data != nullptr) backend.copy(run.data, next, run.bytes, stream);
    next += run.bytes;
  }
}

/** By which tails are drawn where a file does not say it: the seed that its settings name. */
uint32_t implied_seed(const Config& config) {
  const auto* policy = std::get_if<ParisKV>(&config.policy);
  return Tail::seed_of(policy == nullptr ? ParisKV::kSignsSeed : policy->signs_seed());
}

void check_fits_a_file(const char* verb, const Config& config, const Search& search) {
  if (config.borrowed) {
    fail("[", verb,
         "] expected a cache that copies rows; borrowed ones are in the program's memory: save "
         "them there, and give them to prefill_rows again");
  }
  if (search.needs().fits_a_file) return;
  fail("[", verb,
       "] policy: expected one whose sequences fit a file, which is ParisKV; rows that "
       "HardKV and PRKV keep and their recent queries have no place there");
}

}  // namespace

void Cache::save(SequenceId sequence, const std::string& path) const {
  const Impl::Lock lock(*impl_);
  const Impl& impl = *impl_;
  check_fits_a_file("save", impl.config_, *impl.search_);
  const Sequence& source = *impl_->find(impl.verb("save"), {sequence})[0];
  SavedHeader header;
  header.settings = text_of(settings_of(impl.config_));
  if (impl.shape_.narrows()) {
    header.version = impl.shape_.narrow_base.any() ? kBasedVersion : kNarrowVersion;
  }
  if (source.tail_seed() != implied_seed(impl.config_)) header.tail_seed = source.tail_seed();
  for (const Layer& layer : source.layers) {
    const bool has_state = layer.parts[Part::kState] != nullptr;
    header.layers.push_back(
        {layer.regions.marks(), layer.marks.observed, has_state ? 1 : 0, layer.marks.narrow_end});
  }
  const std::vector<Piece> pieces =
      pieces_of(header.layers, sizes_of(impl.shape_, impl.sizes_, *impl.search_, header.version));
  header.checksums.resize(pieces.size());
  const int64_t begin = header.bytes();

  NewFile file(path);
  for (size_t l = 0; l < source.layers.size(); ++l) {
    const Layer& layer = source.layers[l];
    const SequenceView view = impl.view(layer);
    each_piece(*impl.backend_, impl.stop_, pieces, int64_t(l), [&](size_t i) {
      header.checksums[i] = write_piece(pieces[i], layer, view, impl.shape_, *impl.search_,
                                        *impl.backend_, begin, file);
    });
  }
  const int64_t end = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
  const std::vector<char> packed = header.packed(begin + end);
  file.write(packed.data(), int64_t(packed.size()), 0);
  file.commit();
}

SequenceId Cache::load(const std::string& path, Stream stream) {
  check_fits_a_file("load", impl_->config_, *impl_->search_);
  const OldFile file(path);
  const SavedHeader header = SavedHeader::read(file);
  check_settings(path, header.settings, config());
  const SavedSizes sizes = sizes_of(impl_->shape_, impl_->sizes_, *impl_->search_, header.version);
  check_layers(file, header, config().layers, sizes);
  const std::vector<Piece> pieces = pieces_of(header.layers, sizes);
  header.check(file, pieces);

  const Impl::Lock lock(*impl_);
  const Impl::Visit visit(*impl_, stream);
  // Among the others from the start: rows that arrive in host memory meanwhile are its own, too.
  const SequenceId id = impl_->next_id_;
  const auto tail_seed = uint32_t(header.tail_seed.value_or(implied_seed(config())));
  Sequence& sequence =
      impl_->sequences_.emplace(id, impl_->planner_.create(config().layers, tail_seed))
          .first->second;
  try {
    for (int64_t l = 0; l < config().layers; ++l) {
      impl_->restore(sequence.layers[size_t(l)], {file, header, pieces, l}, stream);
    }
  } catch (...) {
    impl_->sequences_.erase(id);
    throw;
  }
  return impl_->next_id_++;
}

void Cache::Impl::restore(Layer& layer, const SavedPart& part, Stream stream) {
  const SavedLayer& saved = part.header.layers[size_t(part.layer)];
  limit_waiting_offloads(stream);
  Step step = plan({&layer}, {Regions(saved.marks)}, Planner::Purpose{}, stream);
  step.offloads_at_once = true;
  step.encoded = true;
  Change& change = step.changes[0];
  change.marks.observed = saved.observed;
  planner_.extend_narrow(change, saved.narrow_end, stream);
  PartBlock& state = change.parts[Part::kState];
  if (saved.has_state != 0 && !state) {
    state = planner_.next_state(layer, stream);
  }
  step.views[0] = change.view(sizes_, *search_);
  const auto read = [&] {
    each_piece(*backend_, stop_, part.pieces, part.layer,
               [&](size_t i) { read_piece(part, i, step.views[0], shape_, *backend_, stream); });
  };
  carry_out(step, read, [] {}, stream);
  // In old files rows behind a zone that was cut are narrow, too. They enter it anew.
  if (layer.marks.narrow_end > layer.regions.retrieval_end(sizes_)) {
    planner_.shorten(layer, layer.regions);
  }
}

}  // namespace pariskv
