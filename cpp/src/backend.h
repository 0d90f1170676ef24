/**
 * The verbs, as one interface, and what a device that works on its own time needs besides.
 * A backend trusts its arguments. It owns the memory it works in and its scratch; it knows
 * nothing of sequences.
 */
#pragma once

#include <memory>

#include "memory/arena.h"
#include "ops.h"
#include "pariskv/config.h"
#include "pariskv/memory.h"
#include "pariskv/stream.h"

namespace pariskv {

class Backend {
 public:
  virtual ~Backend() = default;

  // Verbs. Work is enqueued on `stream`; on the CPU it is done on return.

  virtual void append(const RowsArgs& args, Stream stream) = 0;
  virtual void read(const RowsArgs& args, Stream stream) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  virtual void zero(void* target, int64_t bytes, Stream stream) = 0;

  /** Rows to summaries, and their statistics added. */
  virtual void encode(const EncodeArgs& args, Stream stream) = 0;
  /** Statistics of keys that leave a zone, taken off again. */
  virtual void forget(const EncodeArgs& args, Stream stream) = 0;

  /** Sees that the next decode of these sequences needs no memory it does not have. */
  virtual void reserve(const DecodeArgs& args) = 0;

  /**
   * One token of each sequence: prepare_query, score, select, rerank, attend. Where
   * `decode_appends` says so, it also writes the token's own row.
   */
  virtual void decode(const DecodeArgs& args, Stream stream) = 0;
  virtual bool decode_appends() const { return false; }

  /** What decode goes through for the first sequence; returns when it is known. */
  virtual SearchTrace trace(const DecodeArgs& args, Stream stream) = 0;

  virtual void attend_exact(const AttendExactArgs& args, Stream stream) = 0;
  virtual void exact_logits(const ExactLogitsArgs& args, Stream stream) = 0;

  /** Candidates and rows of all decodes so far. */
  virtual DecodeCounts counts() = 0;

  // Memory.

  /** What verbs work in. */
  virtual Arena& arena() = 0;

  /** Where rows of a zone go to be fetched from; null: they stay where they are. */
  virtual Arena* host_arena() { return nullptr; }

  virtual int64_t scratch_bytes() const = 0;
  /** Whatever was worked on can no longer be read from scratch. */
  virtual void clear_scratch(Stream stream) = 0;

  /** Gives memory that nobody uses back to where it came from. */
  virtual void trim() {}

  /** Bytes of the device's memory as the host may read them; waits for what is under way. */
  virtual void fetch(void* target, const void* source, int64_t bytes) = 0;

  // Order. What a device is given by one call comes after all it was given by calls before.

  /** Whether `stream` records its work instead of doing it. */
  virtual bool capturing(Stream) { return false; }
  virtual void enter(Stream) {}
  virtual void leave(Stream) noexcept {}
  /** Graphs of decodes may be replayed on this stream from now on; nobody tells when. */
  virtual void expect_replays(Stream) {}

  // A device's own books: words of 8 bytes that kernels read, written in the stream's order.

  virtual bool has_books() const { return false; }
  virtual void poke(void* target, uint64_t value) { (void)target, (void)value; }
  virtual void send_pokes(Stream) {}

  // Copies that ride a stream of their own. They see what `stream` has done so far.

  virtual int64_t start_offload(void* target, const void* source, int64_t bytes, Stream stream) {
    (void)target, (void)source, (void)bytes, (void)stream;
    return 0;
  }
  virtual bool offloaded(int64_t ticket) { return (void)ticket, true; }
  virtual void wait_offloaded(int64_t ticket) { (void)ticket; }
  /** Keeps the blocks of a copy that nobody waits for any more until it is done. */
  virtual void adopt(Block source, Block target, int64_t ticket) noexcept {
    (void)source, (void)target, (void)ticket;
  }
};

/** Throws std::invalid_argument when this build has no backend for the device. */
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);

namespace cpu {
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);
}

namespace cuda {
bool is_built();
bool is_available();
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);
}  // namespace cuda

}  // namespace pariskv
