#include "saved/format.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "pariskv/sizes.h"
#include "saved/checksum.h"

namespace pariskv {

namespace {

// As in PNG: a copy that changed line ends, or lost the eighth bit, is no saved sequence.
constexpr char kMagic[8] = {char(0x89), 'P', 'K', 'V', '\r', '\n', 0x1a, '\n'};

struct Prefix {
  char magic[8];
  int64_t version;
  int64_t header_bytes;
  int64_t file_bytes;
  int64_t settings_bytes;
  int64_t layers;
  int64_t pieces;
};
constexpr int64_t kPrefixBytes = int64_t(sizeof(Prefix));
constexpr int64_t kChecksumBytes = int64_t(sizeof(uint64_t));
static_assert(kPrefixBytes == 56 && sizeof(SavedLayer) == 48, "bytes of a file: no padding");

/** Of a layer: all but the last word before files of kNarrowVersion. */
int64_t layer_bytes(int64_t version) { return version >= kNarrowVersion ? 48 : 40; }

constexpr int64_t kSeedBytes = int64_t(sizeof(int64_t));

/** Throws unless a file of this size begins as this version's files do. */
void check_prefix(const OldFile& file, const Prefix& prefix) {
  if (std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0) {
    fail("[load] path: expected a saved sequence, got another kind of file, ", file.path());
  }
  const int64_t version = prefix.version & ~kOwnSeed;
  if (version < kSavedVersion || version > kBasedVersion) {
    fail("[load] path: expected version ", kSavedVersion, " of saved sequences, got version ",
         prefix.version, " in ", file.path(),
         version > kBasedVersion ? "; a newer pariskv_core wrote it" : "");
  }
  if (prefix.file_bytes != file.bytes()) {
    fail("[load] path: expected the ", prefix.file_bytes, " bytes that were written, got ",
         file.bytes(), " in ", file.path(),
         file.bytes() < prefix.file_bytes ? ": its end is missing" : ": something was added");
  }
  if (prefix.header_bytes < kPrefixBytes + kChecksumBytes ||
      prefix.header_bytes > prefix.file_bytes) {
    refuse_damaged(file, "its header has no such size");
  }
}

/** Takes items off the front of a header; false: it has not so many. */
class Reader {
 public:
  Reader(const char* data, int64_t bytes) : data_(data), left_(bytes) {}

  template <typename T>
  bool take(std::vector<T>& items, int64_t count) {
    if (count < 0 || count > left_ / int64_t(sizeof(T))) return false;
    items.resize(size_t(count));
    const size_t bytes = size_t(count) * sizeof(T);
    if (bytes > 0) std::memcpy(items.data(), data_, bytes);
    data_ += bytes, left_ -= int64_t(bytes);
    return true;
  }
  bool empty() const { return left_ == 0; }

 private:
  const char* data_;
  int64_t left_;
};

template <typename T>
char* put(char* target, const T* items, size_t count) {
  if (count > 0) std::memcpy(target, items, count * sizeof(T));
  return target + count * sizeof(T);
}

}  // namespace

void refuse_damaged(const OldFile& file, const std::string& what) {
  fail("[load] path: expected a saved sequence as it was written, got ", file.path(),
       ", which is damaged: ", what);
}

std::vector<Piece> pieces_of(const std::vector<SavedLayer>& layers, const SavedSizes& sizes) {
  std::vector<Piece> pieces;
  int64_t offset = 0;
  const auto add = [&](Piece::Kind kind, int64_t layer, int64_t segment, int64_t begin, int64_t end,
                       int64_t bytes) {
    pieces.push_back({kind, layer, segment, begin, end, offset, bytes});
    offset += bytes;
  };
  for (int64_t l = 0; l < int64_t(layers.size()); ++l) {
    const SavedLayer& layer = layers[size_t(l)];
    const Regions regions(layer.marks);
    const int64_t tokens = sizes.segment_tokens, total = regions.total();
    const int64_t zone_begin = regions.sink_end(sizes.regions);
    const int64_t zone_end = regions.retrieval_end(sizes.regions);
    if (layer.has_state != 0) add(Piece::Kind::kState, l, 0, 0, 0, sizes.state_bytes);
    for (int64_t s = 0; s * tokens < total; ++s) {
      const int64_t first = s * tokens, used = std::min(total - first, tokens);
      const int64_t begin = std::max(zone_begin - first, int64_t{0});
      const int64_t end = std::min(zone_end - first, tokens);
      if (sizes.narrow_token_bytes == 0 || begin > 0 || end < used) {
        add(Piece::Kind::kRows, l, s, 0, used, used * sizes.token_bytes);
      }
      const int64_t narrow_end = std::min(layer.narrow_end - first, tokens);
      if (begin < narrow_end) {
        add(Piece::Kind::kNarrowRows, l, s, begin, narrow_end,
            (narrow_end - begin) * sizes.narrow_token_bytes);
      }
      if (begin >= end || sizes.summary_bytes == 0) continue;
      add(Piece::Kind::kSummaries, l, s, begin, end, sizes.summary_bytes);
    }
  }
  return pieces;
}

int64_t SavedHeader::bytes() const {
  return kPrefixBytes + int64_t(settings.size()) + int64_t(layers.size()) * layer_bytes(version) +
         (tail_seed ? kSeedBytes : 0) + int64_t(checksums.size() + 1) * kChecksumBytes;
}

std::vector<char> SavedHeader::packed(int64_t file_bytes) const {
  std::vector<char> header(static_cast<size_t>(bytes()));
  Prefix prefix{{},
                version | (tail_seed ? kOwnSeed : 0),
                bytes(),
                file_bytes,
                int64_t(settings.size()),
                int64_t(layers.size()),
                int64_t(checksums.size())};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  char* next = put(header.data(), &prefix, 1);
  next = put(next, settings.data(), settings.size());
  for (const SavedLayer& layer : layers) {
    next = put(next, reinterpret_cast<const char*>(&layer), size_t(layer_bytes(version)));
  }
  if (tail_seed) next = put(next, &*tail_seed, 1);
  next = put(next, checksums.data(), checksums.size());
  const uint64_t checksum = checksum_of(header.data(), bytes() - kChecksumBytes);
  put(next, &checksum, 1);
  return header;
}

SavedHeader SavedHeader::read(const OldFile& file) {
  Prefix prefix{};
  if (file.bytes() < kPrefixBytes) {
    fail("[load] path: expected a saved sequence, got ", file.path(), " with ", file.bytes(),
         " bytes");
  }
  file.read(&prefix, kPrefixBytes, 0);
  check_prefix(file, prefix);
  std::vector<char> bytes(static_cast<size_t>(prefix.header_bytes));
  file.read(bytes.data(), prefix.header_bytes, 0);
  const int64_t summed = prefix.header_bytes - kChecksumBytes;
  uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + summed, sizeof checksum);
  if (checksum != checksum_of(bytes.data(), summed)) {
    refuse_damaged(file, "the checksum of its header is another one");
  }
  SavedHeader header;
  header.version = prefix.version & ~kOwnSeed;
  const bool has_seed = (prefix.version & kOwnSeed) != 0;
  std::vector<char> text, layers;
  std::vector<int64_t> seed;
  Reader reader(bytes.data() + kPrefixBytes, summed - kPrefixBytes);
  const int64_t layer = layer_bytes(header.version);
  const bool counts = prefix.layers >= 0 && prefix.layers <= summed / layer;
  if (!reader.take(text, prefix.settings_bytes) || !counts ||
      !reader.take(layers, prefix.layers * layer) || !reader.take(seed, has_seed ? 1 : 0) ||
      !reader.take(header.checksums, prefix.pieces) || !reader.empty()) {
    refuse_damaged(file, "its header has other parts than it says");
  }
  header.layers.resize(size_t(prefix.layers));
  for (size_t l = 0; l < header.layers.size(); ++l) {
    std::memcpy(&header.layers[l], layers.data() + l * size_t(layer), size_t(layer));
  }
  header.settings.assign(text.begin(), text.end());
  if (has_seed) header.tail_seed = seed[0];
  return header;
}

void SavedHeader::check(const OldFile& file, const std::vector<Piece>& pieces) const {
  const int64_t end = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
  if (pieces.size() != checksums.size() || bytes() + end != file.bytes()) {
    refuse_damaged(file, "its layers do not add up to its size");
  }
}

namespace {

/** All of a zone is narrow, and no row of the sink. */
bool narrow_end_is_sound(const SavedLayer& layer, const SavedSizes& sizes) {
  const Regions regions(layer.marks);
  const int64_t sink = regions.sink_end(sizes.regions);
  if (layer.narrow_end == 0) {
    return sizes.narrow_token_bytes == 0 || regions.zone_tokens(sizes.regions) == 0;
  }
  return sizes.narrow_token_bytes > 0 && layer.narrow_end > sink &&
         layer.narrow_end >= regions.retrieval_end(sizes.regions) &&
         layer.narrow_end <= regions.total();
}

}  // namespace

void check_layers(const OldFile& file, const SavedHeader& header, int64_t layers,
                  const SavedSizes& sizes) {
  if (int64_t(header.layers.size()) != layers) refuse_damaged(file, "it has other layers");
  if (header.tail_seed && *header.tail_seed != int64_t(uint32_t(*header.tail_seed))) {
    refuse_damaged(file, "no tail is drawn by such a seed");
  }
  int64_t left = file.bytes();
  for (const SavedLayer& layer : header.layers) {
    const int64_t total = layer.marks.total;
    const bool sound = Regions::reachable(layer.marks, sizes.regions) && total <= kMostTokens &&
                       layer.observed >= 0 &&
                       layer.observed <= std::min(total, sizes.wanted.positions()) &&
                       (layer.has_state == 0 || (layer.has_state == 1 && sizes.state_bytes > 0)) &&
                       narrow_end_is_sound(layer, sizes);
    if (sound) left -= total * sizes.least_token_bytes();
    const bool needs_state =
        sound && sizes.state_bytes > 0 &&
        (layer.observed > 0 || Regions(layer.marks).zone_tokens(sizes.regions) > 0);
    if (!sound || left < 0 || (needs_state && layer.has_state == 0)) {
      refuse_damaged(file, "no sequence has such a layer");
    }
  }
}

}  // namespace pariskv
