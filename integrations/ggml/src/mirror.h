/** The engine behind one KV cache of the host: summaries of its keys, and no rows. */
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ledger.h"
#include "pariskv/pariskv.h"
#include "settings.h"
#include "shapes.h"

namespace pariskv::ggml {

/** What all layers of a mirrored cache have in common. */
struct Geometry {
  int64_t query_heads, kv_heads, head_dim, value_dim;
  ggml_type key_type, value_type;

  static Geometry of(const Attention& attention);
  Config config(const Settings& settings) const;
  /** Settings::from, or cells from which on a step is likely to be quicker than the host's. */
  int64_t pays_from(const Settings& settings) const;

  friend bool operator==(const Geometry& a, const Geometry& b) {
    return a.query_heads == b.query_heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
           a.value_dim == b.value_dim && a.key_type == b.key_type && a.value_type == b.value_type;
  }
};

class Mirror {
 public:
  /** @param stops  asked between the pieces of a long call, see Resources::should_stop */
  Mirror(const Geometry& geometry, const Settings& settings, int64_t layers, int threads,
         std::function<bool()> stops);

  /** Carries out what a plan changes, in all layers. */
  void change(const Plan& plan);

  /**
   * One layer's attention for the tokens of a plan: takes in what the layer lacks, then attends.
   * @return whether it did; false: this layer has more than these tokens see
   */
  bool attend(int64_t layer, const Attention& attention, const Plan& plan, const Ledger& ledger,
              ggml_tensor* out);

  Stats stats() const { return cache_.stats(); }

 private:
  struct Row {
    int64_t token, stream;  // of the step's
    SequenceId sequence;
    int64_t has, sees;
    const std::vector<int32_t>* cells;
  };
  void truncate(SequenceId sequence, int64_t keep);
  RowAddresses addresses(const Attention& attention, const Row& row, int64_t begin,
                         int64_t end) const;
  void take_in(int64_t layer, const Attention& attention, const std::vector<Row>& rows);
  void attend_rows(int64_t layer, const Attention& attention, const std::vector<Row>& rows,
                   bool appends, ggml_tensor* out);

  Geometry geometry_;
  int64_t layers_;
  Cache cache_;
  std::vector<SequenceId> sequences_;  // by slot
  std::vector<float> queries_, outputs_, errors_;
};

}  // namespace pariskv::ggml
