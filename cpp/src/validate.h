/**
 * Arguments are checked once, here, before anything changes. Messages read
 * "[verb] argument: expected ..., got ...".
 */
#pragma once

#include <initializer_list>
#include <string>

#include "ops.h"
#include "pariskv/cache.h"

namespace pariskv {

/** The call that checks its arguments: its name for messages, the config for shapes. */
struct Verb {
  const char* name;
  const Config& config;

  void check_layer(int64_t layer) const;

  /** Throws unless `view` has exactly this shape and dtype, and rows without gaps. */
  void check_tensor(const char* argument, const TensorView& view, DType dtype,
                    std::initializer_list<int64_t> shape) const;

  /** The same for a tensor that will be written: no two elements may share an address. */
  void check_output(const char* argument, const TensorView& view, DType dtype,
                    std::initializer_list<int64_t> shape) const;

  /** Throws if an output has memory of another argument; it may be all of it where that works. */
  void check_apart(const char* output, const TensorView& out, const char* argument,
                   const TensorView& view, bool may_be_same = false) const;

  /** The same of the borrowed rows of a call. */
  void check_apart(const char* output, const TensorView& out, const RowAddresses& rows) const;

  /** Throws where new rows come as addresses to a cache that copies, or the other way round. */
  void check_borrows(bool addresses) const;

  /** Throws unless K and V of each token have an address, aligned to their numbers. */
  void check_addresses(const RowAddresses& rows, int64_t tokens) const;

  void check_batch_size(const char* argument, int64_t size, int64_t batch) const;

  /** Throws on a negative length or too many tokens; returns the sum. */
  int64_t check_lengths(const std::vector<int64_t>& lengths, int64_t batch) const;

  /** Throws unless each sequence of a call that fills a page table gets tokens. */
  void check_paged(const std::vector<int64_t>& lengths) const;

  /** Throws when a sequence would have more tokens than positions are kept for. */
  void check_total(int64_t tokens) const;

  /** Throws when rows of positions that a call reads were dropped. */
  void check_stored(SequenceId sequence, const Positions& dropped, const Positions& read) const;

  /** Throws when rows of a sequence were dropped: the call would need all of them. */
  void check_complete(SequenceId sequence, const Positions& dropped, const char* instead) const;

  /**
   * Throws: a sequence that is cut to `kept` tokens would lack rows of its local window.
   * @param counts  whether the argument counts tokens that are kept, or dropped
   */
  void refuse_cut(const char* argument, Cut::Counts counts, SequenceId sequence,
                  const Positions& dropped, int64_t total, int64_t kept) const;

  /** Throws on numbers that are no scale, cap or bias (read on the CPU), and on wrong shapes. */
  Logits check_options(const AttendOptions& options, int64_t tokens) const;

  /** Throws unless errors can be written, if any are wanted: only searches that have one can. */
  TensorView check_error(const AttendOptions& options, int64_t batch, bool is_estimated) const;

  /** Throws where a call that is no decode is asked for what decodes alone can. */
  void refuse_decodes_own(const AttendOptions& options) const;

  /** Throws if another precision is asked for than there is. */
  void refuse_fast(const AttendOptions& options) const;

  /** The view to write log-sum-exps to; data null when none is wanted. */
  static TensorView lse_of(const AttendOptions& options) {
    return options.lse ? *options.lse : TensorView{};
  }
};

std::string describe(const TensorView& view);

}  // namespace pariskv
