#include "store.h"

#include <algorithm>
#include <exception>

#include "visible.h"

namespace pariskv::ggml {

namespace {

/** Of Settings::from: a cache that is emptied below this is not watched any more. */
constexpr int64_t kStaysFrom = 2;

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

bool Store::claims_write(const CacheTensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (tensor.is_key ? keys_ : values_)[tensor.layer] = tensor.root;
  const bool claims = wants_ && !failed_ && tensor.stream_cells() >= settings_.from;
  if (!claims) {
    // What is written unseen from here on may be any cell.
    forget();
    ledger_.reset();
  }
  return claimed_[tensor.root] = claims;
}

bool Store::claims_attention(const Attention& attention) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_ || !attention.is_readable()) return false;
  // llama.cpp decides whether to use flash attention at all by asking who would compute it, before
  // there is a cache to attend to: only the device that holds the layer may say yes.
  if (!has_run_) return false;
  const int64_t cells = attention.visible_cells();
  wants_ = cells >= settings_.from || (wants_ && kStaysFrom * cells >= settings_.from);
  if (cells < settings_.from || attention.rows() > settings_.most_tokens) return false;
  if (!claimed_[attention.key.root] || !claimed_[attention.value.root]) return false;
  const Geometry geometry = Geometry::of(attention);
  if (fits_ && *fits_ == geometry) return true;
  // One engine serves layers of one shape: those that come first.
  if (fits_ || (fits_not_ && *fits_not_ == geometry)) return false;
  (is_valid(geometry, settings_) ? fits_ : fits_not_) = geometry;
  return fits_.has_value();
}

void Store::wrote_rows(const ggml_tensor* op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_run_ = true;
  const CacheTensor tensor = cache_tensor_of(op);
  if (!tensor.is_key) return;  // V goes to the same cells
  if (!ledger_) ledger_ = std::make_unique<Ledger>(tensor.cells());
  if (tensor.layer == keys_.begin()->first || !written_.insert(tensor.layer).second) {
    ledger_->begin_pass();
    written_ = {tensor.layer};
  }
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
      written_.clear();
      const int64_t first = int64_t(size_t(begin - base) / root->nb[1]);
      const size_t end = std::min(size_t(begin - base) + bytes, size);
      for (int64_t cell = first; cell <= int64_t((end - 1) / root->nb[1]); ++cell) {
        ledger_->write(cell);
      }
    }
  }
}

int64_t Store::layer_number(const CacheTensor& tensor) const {
  return std::distance(keys_.begin(), keys_.find(tensor.layer));
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
}

Outcome Store::attend(ggml_tensor* op, int threads, const std::function<bool()>& stops) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Attention attention(op);
  stops_ = &stops;  // of the context that is computing: nothing asks between calls
  has_run_ = true;
  if (failed_ || keys_.count(attention.key.layer) == 0) return ++counts_.left, Outcome::kLeft;
  try {
    if (ledger_ == nullptr) ledger_ = std::make_unique<Ledger>(attention.key.cells());
    if (mirror_ == nullptr) {
      mirror_ =
          std::make_unique<Mirror>(Geometry::of(attention), settings_, int64_t(keys_.size()),
                                   threads, [this] { return stops_ != nullptr && (*stops_)(); });
    }
    const int64_t layer = layer_number(attention.key);
    if (layer >= mirror_->layers()) return ++counts_.left, Outcome::kLeft;
    find_plan(layer, attention);
    if (!plan_.serves || !mirror_->attend(layer, attention, plan_, *ledger_, op)) {
      return ++counts_.left, Outcome::kLeft;
    }
    ++counts_.steps;
    return Outcome::kDone;
  } catch (const Stopped&) {
    forget();
    return Outcome::kStopped;
  } catch (const std::exception& error) {
    // Not again: what failed for want of memory would fail for each token.
    say(GGML_LOG_LEVEL_ERROR, std::string("left to the host from here on: ") + error.what());
    failed_ = true;
    forget();
    return Outcome::kLeft;
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
  const Stats stats = mirror_->stats();
  return text + ", " + std::to_string(stats.memory.live >> 20) + " MiB";
}

}  // namespace pariskv::ggml
