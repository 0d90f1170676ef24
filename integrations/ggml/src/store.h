/**
 * What is known of one KV cache of the host, from its allocation to its end: which layers it has,
 * what was written to it, and the engine that searches it.
 */
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "ledger.h"
#include "mirror.h"
#include "settings.h"
#include "shapes.h"

namespace pariskv::ggml {

/** What came of a layer's attention. */
enum class Outcome { kDone, kLeft, kStopped };  ///< kLeft: for the host to compute.

struct Counts {
  int64_t steps = 0;    // layers' steps that the engine served
  int64_t left = 0;     // that it left to the host although it had claimed them
  int64_t rebuilt = 0;  // sequences that were read from their beginning
  int64_t forks = 0;
};

class Store {
 public:
  Store(ggml_backend_buffer_t buffer, const Settings& settings);

  // What a scheduler asks before it gives out nodes. An answer holds until the node is asked about
  // again: a host that uses a graph once more does not ask.

  /**
   * Whether a write is ours: then it is known, and only then can attention be. Rows go to the same
   * cells in all layers: of these writes those of the first layer's keys are enough, and each that
   * is claimed costs the host two hand-overs.
   */
  bool claims_write(const CacheTensor& tensor, bool is_of_rows);
  bool claims_attention(const Attention& attention);

  // What happens.

  /** Rows were written by `op`, see is_row_write. */
  void wrote_rows(const ggml_tensor* op);
  /** Another node wrote somewhere: a shift of positions. */
  void wrote_all();
  /** The program wrote bytes itself: a state that it loads. */
  void wrote_bytes(const char* begin, size_t bytes);

  Outcome attend(ggml_tensor* op, int threads, const std::function<bool()>& stops);

  /** A line on what was done, or nothing. */
  std::string summary() const;

  /** The buffer's functions as they were before `watch`. */
  const ggml_backend_buffer_i& original() const { return original_; }

 private:
  int64_t from() const;
  bool fits(const Attention& attention);
  int64_t layer_number(const CacheTensor& tensor) const;
  void find_plan(int64_t layer, const Attention& attention);
  void forget();
  void say_once(const std::string& why);

  mutable std::mutex mutex_;
  const Settings& settings_;
  ggml_backend_buffer_i original_;
  std::map<int64_t, const ggml_tensor*> keys_, values_;  // by the model's layer
  std::set<int64_t> searched_;                           // layers of the shape that fits
  std::optional<Geometry> fits_, fits_not_;              // the last shapes that were tried
  std::set<std::string> said_;

  // What decides on claims of writes: whether a step may be ours soon.
  bool watches_ = false;      // the last answer
  bool is_long_ = true;       // the last step that was asked about, or nearly
  bool searchable_ = true;    // the last graph had attention that is ours once it is long enough
  bool asked_ = false;        // so had this one, up to now
  bool has_written_ = false;  // this graph: the next question is about another one
  bool has_run_ = false;  // a graph: until then attention is left to the host, see claims_attention

  const std::function<bool()>* stops_ = nullptr;
  std::unique_ptr<Ledger> ledger_;
  std::unique_ptr<Mirror> mirror_;
  Plan plan_;
  // What the plan was made from, and the layer that went by it last.
  const ggml_tensor* mask_ = nullptr;
  uint32_t pass_ = 0;
  int64_t last_layer_ = 0;
  Counts counts_;
};

/** The store of a buffer that cache tensors lie in; made, and its buffer watched, if there is none.
 */
std::shared_ptr<Store> store_of(ggml_backend_buffer_t buffer, const Settings& settings);

}  // namespace pariskv::ggml
