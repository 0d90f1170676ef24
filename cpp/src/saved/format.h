/**
 * How a sequence lies in a file: docs/saved-contexts.md has the table.
 *
 *   prefix    magic, version, sizes of the header and of the file
 *   settings  text
 *   layers    (layers) SavedLayer
 *   seed      of the sequence's tail; where the version says that the settings do not give it
 *   checksums (pieces) of each piece, in their order
 *   checksum  of all of the header before it
 *   pieces    without gaps: for each layer its state, then the rows, the narrow rows and the
 *             summaries of each segment; no rows where all are narrow
 *
 * Everything is little-endian. Every byte counts for one checksum, and says one thing only.
 */
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "query_windows.h"
#include "regions.h"
#include "saved/file.h"

namespace pariskv {

constexpr int64_t kSavedVersion = 3;
constexpr int64_t kNarrowVersion = 4;  // where rows of zones are narrow: layers tell how far
constexpr int64_t kBasedVersion = 5;   // states have the common part of these rows
/** Added to a version: the tail of the sequence is drawn by a seed of its own. */
constexpr int64_t kOwnSeed = 256;

/** One layer of a sequence, but for its bytes. */
struct SavedLayer {
  Regions::Marks marks;
  int64_t observed;        // queries that its policy was given, of those it wants
  int64_t has_state;       // 0 or 1
  int64_t narrow_end = 0;  // the end of narrow rows; in files of kNarrowVersion and later
};

/** Sizes that follow from a cache's settings. */
struct SavedSizes {
  RegionSizes regions;
  int64_t segment_tokens;
  int64_t token_bytes;    // the rows of a token, of all kv heads
  int64_t summary_bytes;  // of a segment
  int64_t state_bytes;
  QueryWindows wanted;             // queries that the policy wants
  int64_t narrow_token_bytes = 0;  // of narrow rows; 0: none are

  /** Least bytes of a token's rows. */
  int64_t least_token_bytes() const {
    return narrow_token_bytes > 0 && narrow_token_bytes < token_bytes ? narrow_token_bytes
                                                                      : token_bytes;
  }
};

/** A piece of a file, with a checksum of its own. */
struct Piece {
  enum class Kind { kState, kRows, kSummaries, kNarrowRows };
  Kind kind;
  int64_t layer;
  int64_t segment;
  int64_t begin, end;  // slots of the segment: its rows, or those in the zone or narrow
  int64_t offset;      // in the pieces' part of the file
  int64_t bytes;
};

/** The pieces of all layers in their order. */
std::vector<Piece> pieces_of(const std::vector<SavedLayer>& layers, const SavedSizes& sizes);

struct SavedHeader {
  int64_t version = kSavedVersion;     // without kOwnSeed
  std::optional<int64_t> tail_seed{};  // none: as settings have it
  std::string settings;
  std::vector<SavedLayer> layers;
  std::vector<uint64_t> checksums;  // (pieces)

  /** Where the pieces begin. */
  int64_t bytes() const;

  /** @param file_bytes of the whole file */
  std::vector<char> packed(int64_t file_bytes) const;

  /** Reads the header of a file and compares it with its checksum; throws if anything is wrong. */
  static SavedHeader read(const OldFile& file);

  /** Throws unless the file has these pieces, and nothing else. */
  void check(const OldFile& file, const std::vector<Piece>& pieces) const;
};

/** Throws unless a cache of so many layers and these sizes can have such a sequence. */
void check_layers(const OldFile& file, const SavedHeader& header, int64_t layers,
                  const SavedSizes& sizes);

[[noreturn]] void refuse_damaged(const OldFile& file, const std::string& what);

}  // namespace pariskv
