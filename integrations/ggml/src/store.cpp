#include "store.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>

#include "visible.h"

namespace pariskv::ggml {

namespace {

/** Of the gate: a cache that is emptied below this share is not watched any more. */
constexpr int64_t kWatchedFrom = 2;

bool is_valid(const Geometry& geometry, const Settings& settings) {
  try {
    geometry.config(settings).validate();
    return true;
  } catch (const std::exception& error) {
    say(GGML_LOG_LEVEL_WARN, std::string("left to the host: ") + error.what());
    return false;
  }
}

}  // namespace

Store::Store(ggml_backend_buffer_t buffer, const Settings& settings)
    : settings_(settings), original_(buffer->iface) {}

void Store::forget() {
  mirror_.reset();
  if (ledger_) ledger_->forget();
  mask_ = nullptr;
}

int64_t Store::from() const {
  return fits_ ? fits_->pays_from(settings_) : settings_.from.value_or(kLeastFrom);
}

void Store::say_once(const std::string& why) {
  // A dry run of a context has buffers that nobody frees.
  if (original_.free_buffer == nullptr || !said_.insert(why).second) return;
  say(GGML_LOG_LEVEL_INFO, "left to the host: " + why);
}

bool Store::claims_write(const CacheTensor& tensor, bool is_of_rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (tensor.is_key ? keys_ : values_)[tensor.layer] = tensor.root;
  if (!is_of_rows) return watches_;
  if (!tensor.is_key || tensor.layer != keys_.begin()->first) return false;
  if (has_written_) {
    searchable_ = asked_;
    asked_ = has_written_ = false;
    if (!searchable_ && said_.empty() && !fits_not_) {
      say_once("no attention reads this cache in place; has the host flash attention (-fa on)?");
    }
  }
  const bool has_room = tensor.stream_cells() >= from();
  if (!has_room) {
    say_once("steps over fewer than " + std::to_string(from()) + " cells, and this cache has " +
             std::to_string(tensor.stream_cells()));
  }
  watches_ = searchable_ && is_long_ && has_room;
  if (!watches_) {
    // What is written unseen from here on may be any cell.
    forget();
    ledger_.reset();
  }
  return watches_;
}

bool Store::fits(const Attention& attention) {
  if (const char* why = attention.obstacle()) return say_once(why), false;
  const Geometry geometry = Geometry::of(attention);
  if (!fits_ && !(fits_not_ && *fits_not_ == geometry)) {
    (is_valid(geometry, settings_) ? fits_ : fits_not_) = geometry;
  }
  if (fits_ && !(*fits_ == geometry)) {
    // One engine serves layers of one shape: those that come first.
    say_once("layers whose heads have another shape than those of the first ones");
  }
  return fits_ && *fits_ == geometry;
}

bool Store::claims_attention(const Attention& attention) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!fits(attention)) return false;
  asked_ = searchable_ = true;
  if (searched_.insert(attention.key.layer).second) forget();
  // llama.cpp decides whether to use flash attention at all by asking who would compute it, before
  // there is a cache to attend to: only the device that holds the layer may say yes.
  if (!has_run_) return false;
  const int64_t cells = attention.visible_cells();
  is_long_ = kWatchedFrom * cells >= from();
  if (attention.rows() > settings_.most_tokens) return false;  // a prompt
  if (cells < from()) {
    say_once("steps over fewer than " + std::to_string(from()) + " cells");
    return false;
  }
  return watches_ && !(ledger_ && ledger_->rests());
}

void Store::wrote_rows(const ggml_tensor* op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_run_ = has_written_ = true;
  const CacheTensor tensor = cache_tensor_of(op);
  if (!ledger_) ledger_ = std::make_unique<Ledger>(tensor.cells());
  ledger_->begin_pass();
  for (int64_t i = 0; i < op->src[1]->ne[0]; ++i) {
    const int64_t cell = written_cell(op, i);
    if (cell >= 0 && cell < ledger_->cells()) ledger_->write(cell);
  }
}

void Store::wrote_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_run_ = true;
  // Everything is read anew with the next step: a shift of positions touches every key.
  forget();
}

void Store::wrote_bytes(const char* begin, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ledger_ || bytes == 0) return;
  for (const auto* tensors : {&keys_, &values_}) {
    for (const auto& [layer, root] : *tensors) {
      const char* base = static_cast<const char*>(root->data);
      const size_t size = root->nb[1] * size_t(root->ne[1] * root->ne[2]);
      if (begin < base || begin >= base + size) continue;
      ledger_->begin_pass();
      const int64_t first = int64_t(size_t(begin - base) / root->nb[1]);
      const size_t end = std::min(size_t(begin - base) + bytes, size);
      for (int64_t cell = first; cell <= int64_t((end - 1) / root->nb[1]); ++cell) {
        ledger_->write(cell);
      }
    }
  }
}

int64_t Store::layer_number(const CacheTensor& tensor) const {
  return std::distance(searched_.begin(), searched_.find(tensor.layer));
}

void Store::find_plan(int64_t layer, const Attention& attention) {
  // A step's layers come in order, and a host may build its next graph where the last one was.
  const bool same_step = mask_ == attention.mask && layer > last_layer_ && pass_ == ledger_->pass();
  last_layer_ = layer;
  if (same_step) return;
  mask_ = attention.mask;
  pass_ = ledger_->pass();
  plan_ = {};
  plan_.serves = false;
  std::vector<Bits> visible;
  for (int64_t stream = 0; stream < attention.streams(); ++stream) {
    for (int64_t token = 0; token < attention.tokens(); ++token) {
      visible.emplace_back(ledger_->cells());
      // A mask with other numbers than 0 and -inf is a bias, and a token that sees nothing has
      // nothing to search.
      if (!read_mask(attention, token, stream, &visible.back())) return;
    }
  }
  plan_ = ledger_->plan(visible);
  for (const Change& change : plan_.changes) {
    counts_.rebuilt += change.kind == Change::Kind::kAdd;
    counts_.forks += change.kind == Change::Kind::kFork;
  }
  mirror_->change(plan_);
  if (plan_.rest > 0) {
    say(GGML_LOG_LEVEL_WARN,
        "left to the host for " + std::to_string(plan_.rest) +
            " steps: cells that a token sees change all the time, as under a sliding window");
  }
}

Outcome Store::attend(ggml_tensor* op, int threads, const std::function<bool()>& stops) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Attention attention(op);
  stops_ = &stops;  // of the context that is computing: nothing asks between calls
  has_run_ = true;
  if (searched_.count(attention.key.layer) == 0) return ++counts_.left, Outcome::kLeft;
  try {
    if (ledger_ == nullptr) ledger_ = std::make_unique<Ledger>(attention.key.cells());
    if (mirror_ == nullptr) {
      mirror_ =
          std::make_unique<Mirror>(Geometry::of(attention), settings_, int64_t(searched_.size()),
                                   threads, [this] { return stops_ != nullptr && (*stops_)(); });
    }
    const int64_t layer = layer_number(attention.key);
    find_plan(layer, attention);
    if (!plan_.serves || !mirror_->attend(layer, attention, plan_, *ledger_, op)) {
      return ++counts_.left, Outcome::kLeft;
    }
    ++counts_.steps;
    return Outcome::kDone;
  } catch (const Stopped&) {
    // What layers have is right, if not alike: the next step reads what each of them lacks.
    return Outcome::kStopped;
  } catch (const std::exception& error) {
    // Not again at once: what failed for want of memory is likely to fail for the next token, too.
    forget();
    const int64_t steps = ledger_ != nullptr ? ledger_->begin_rest() : 1;
    say(GGML_LOG_LEVEL_ERROR,
        "left to the host for " + std::to_string(steps) + " steps: " + error.what());
    return ++counts_.left, Outcome::kLeft;
  }
}

std::string Store::summary() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (counts_.steps + counts_.left == 0) return {};
  std::string text = std::to_string(counts_.steps) + " layers' steps, " +
                     std::to_string(counts_.left) + " left to the host, " +
                     std::to_string(counts_.rebuilt) + " sequences read, " +
                     std::to_string(counts_.forks) + " forked";
  if (mirror_ == nullptr) return text;
  int64_t cache = 0;
  for (const auto* tensors : {&keys_, &values_}) {
    for (const auto& [layer, root] : *tensors) cache += int64_t(root->nb[2]) * root->ne[2];
  }
  const Stats stats = mirror_->stats();
  const int64_t own = stats.memory.live;
  text += ", " + std::to_string((own + (1 << 19)) >> 20) + " MiB, " +
          std::to_string((100 * own + cache / 2) / cache) + " % of the cache";
  if (std::isnan(stats.mean_error)) return text;
  char error[64];
  std::snprintf(error, sizeof error, ", error %.4f, at worst %.3f", stats.mean_error,
                stats.worst_error);
  return text + error;
}

}  // namespace pariskv::ggml
