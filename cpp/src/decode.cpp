// A decode step, of a batch that may have slots without a sequence.
#include <algorithm>
#include <limits>

#include "cache_impl.h"

namespace pariskv {

namespace {

/** Rows [first, first + count) of a tensor; of one that is not there, itself. */
TensorView rows_of(TensorView tensor, int64_t first, int64_t count) {
  if (tensor.data == nullptr) return tensor;
  tensor.data = static_cast<char*>(tensor.data) + first * tensor.strides[0] * size_of(tensor.dtype);
  tensor.shape[0] = count;
  return tensor;
}

RowAddresses rows_of(const RowAddresses& rows, int64_t first, int64_t count) {
  const auto part = [&](const std::vector<const void*>& all) {
    return std::vector<const void*>(all.begin() + first, all.begin() + first + count);
  };
  return {part(rows.keys), part(rows.values)};
}

RowAddresses rows_of(const RowAddresses& rows, const std::vector<int64_t>& slots) {
  RowAddresses found;
  for (const int64_t slot : slots) {
    found.keys.push_back(rows.keys[size_t(slot)]);
    found.values.push_back(rows.values[size_t(slot)]);
  }
  return found;
}

}  // namespace

void Cache::Impl::check_new_rows(const Verb& verb, const NewRows& rows, const Slots& slots) const {
  const size_t all = size_t(slots.all);
  const RowAddresses* borrowed = rows.borrowed;
  if (borrowed == nullptr || borrowed->keys.size() != all || borrowed->values.size() != all) {
    return check_new_rows(verb, rows, slots.all);
  }
  const RowAddresses named = rows_of(*borrowed, slots.numbers);  // idle slots need none
  check_new_rows(verb, {{}, {}, &named}, int64_t(slots.numbers.size()));
}

void Cache::Impl::clear_idle(const Slots& slots, const DecodeArgs& args, Stream stream) {
  const auto clear = [&](int64_t slot) {
    for (int64_t head = 0; head < config_.query_heads; ++head) {
      const TensorView& out = args.out;
      const int64_t at = slot * out.strides[0] + head * out.strides[1];
      backend_->zero(static_cast<char*>(out.data) + at * size_of(out.dtype),
                     config_.value_dim * size_of(out.dtype), stream);
    }
    float* lse = floats_of(args.lse, slot);
    if (lse != nullptr)
      std::fill_n(lse, config_.query_heads, -std::numeric_limits<float>::infinity());
    float* error = floats_of(args.error, slot);
    if (error != nullptr) std::fill_n(error, config_.kv_heads, 0.0f);
  };
  int64_t slot = 0;
  for (const Slots::Run& run : slots.runs) {
    for (; slot < run.slot; ++slot) clear(slot);
    slot = run.slot + run.count;
  }
  for (; slot < slots.all; ++slot) clear(slot);
}

BatchLayer& Cache::Impl::last_step(const Verb& verb, const Batch& batch, int64_t layer) {
  verb.check_layer(layer);
  const Batch::Prepared* prepared = batch.prepared_.get();
  const bool foreign = prepared != nullptr && prepared->cache != number_;
  BatchLayer* known = foreign ? nullptr : quiet_steps_.find(batch.ids(), layer);
  if (known != nullptr) return ++calls_, *known;
  return quiet_steps_.add(batch.ids(), find(verb, batch, IdleSlots::kAllowed), config_.layers,
                          layer);
}

DecodeArgs Cache::Impl::decode_args(const Verb& verb, int64_t layer, const Slots& slots,
                                    const StepTensors& tensors, bool appends,
                                    const AttendOptions& options) {
  verb.check_tensor("q", tensors.q, config_.dtype,
                    {slots.all, config_.query_heads, config_.head_dim});
  if (appends) check_new_rows(verb, tensors.rows, slots);
  verb.check_output("out", tensors.out, config_.dtype,
                    {slots.all, config_.query_heads, config_.value_dim});
  DecodeArgs args = decode_args(layer);
  args.batch = slots.all;
  args.q = tensors.q, args.k = tensors.rows.k, args.v = tensors.rows.v, args.out = tensors.out;
  args.logits = verb.check_options(options, slots.all);
  verb.refuse_fast(options);
  args.lse = Verb::lse_of(options);
  args.error = verb.check_error(options, slots.all, search_->needs().estimates_error);
  check_apart(verb, tensors, args.lse, args.error);
  return args;
}

void Cache::Impl::decode(int64_t layer, const Batch& sequences, const StepTensors& tensors,
                         bool appends, const AttendOptions& options, Stream stream) {
  const Lock lock(*this, Lock::Layers::kUntold);
  const Verb verb = this->verb(tensors.rows.borrowed == nullptr ? "decode" : "decode_rows");
  BatchLayer& at = last_step(verb, sequences, layer);
  DecodeArgs args = decode_args(verb, layer, at.slots, tensors, appends, options);

  if (backend_->capturing(stream)) {  // a replay reads the lengths of its time
    quiet_steps_.settle();
    std::vector<SequenceView> views;
    for (const Layer* target : at.slots.layers) views.push_back(view(*target));
    views = at.slots.spread(views.data());
    args.sequences = views.data();
    search_->decode(args, stream);
    return;
  }

  const int64_t tokens = appends ? 1 : 0;
  for (size_t i = 0; at.left < tokens && i < at.slots.layers.size(); ++i) {
    const int64_t total = at.view(i).total;
    if (!appends && total == 0) {
      fail("[decode] sequences: expected tokens to attend to, but ",
           sequences.ids()[size_t(at.slots.numbers[i])], " has none in layer ", layer,
           "; or pass k and v");
    }
    verb.check_total(total + tokens);
  }
  const Visit visit(*this, stream, Visit::Steps::kGoOn);
  reserved_for_.reset();
  quiet_steps_.note(calls_);
  if (at.left >= tokens) return decode_quietly(at, args, tokens, stream);
  decode_planned(at, args, tensors.rows, tokens, stream);
}

void Cache::Impl::decode_quietly(BatchLayer& at, DecodeArgs args, int64_t tokens, Stream stream) {
  offload_pace_.start_beside(true, stream);
  at.count(tokens);
  args.sequences = at.views.data();
  try {
    if (tokens > 0) {
      backend_->word_updates()->add_token(at.places.data(), at.slots.size(), 1, stream);
    }
    search_->decode(args, stream);
  } catch (...) {
    at.count(-tokens);
    forget(at);
    throw;
  }
  at.left -= tokens;
  if (search_->needs().rows_per_head > 0) stats_.searched_tokens += at.searched;
  stats_.decode_tokens += at.slots.size();
}

void Cache::Impl::decode_planned(BatchLayer& at, DecodeArgs args, const NewRows& rows,
                                 int64_t tokens, Stream stream) {
  const Slots& slots = at.slots;
  // Where graphs are, kernels know idle slots. Elsewhere a step is made of the runs between them.
  const bool whole = backend_->capabilities().graphs;
  std::vector<size_t> due;
  std::vector<SequenceView> views;  // (slots)
  std::vector<SequenceView*> counted;
  const auto look = [&] {
    due.clear(), counted.clear();
    for (size_t i = 0; i < slots.layers.size(); ++i) {
      const bool is_due = at.due(i, tokens);
      if (is_due) due.push_back(i);
      if (!is_due && tokens > 0) counted.push_back(at.places[i]);
    }
  };
  Step step;
  for (look();;) {
    std::vector<Layer*> layers;
    std::vector<Regions> next;
    for (const size_t i : due) {
      at.settle(i);
      layers.push_back(slots.layers[i]);
      const Regions& regions = layers.back()->regions;
      next.push_back(tokens > 0 ? regions.grown(tokens, sizes_) : regions);
    }
    step = plan(layers, next, Planner::Use::kDecode, stream, false, [&](Step& planned) {
      views = at.views;
      for (const int64_t slot : slots.numbers) views[size_t(slot)].total += tokens;
      for (size_t j = 0; j < due.size(); ++j) {
        views[size_t(slots.numbers[due[j]])] = planned.views[j];
      }
      DecodeArgs needs = args;
      needs.batch = whole ? slots.all : slots.size();
      needs.sequences = whole ? views.data() : planned.views.data();
      if (needs.batch > 0) search_->reserve(needs);
    });
    // Rows may have moved to make room: more may be due by that.
    const size_t before = due.size();
    look();
    if (due.size() == before) break;
  }

  // Without a local window the token itself may enter the zone: its row has to be there first.
  const bool append_first =
      tokens > 0 && (!backend_->capabilities().decode_appends || config_.local == 0);
  const auto append = [&] {
    if (!counted.empty()) {
      backend_->word_updates()->add_token(counted.data(), int64_t(counted.size()), 1, stream);
    }
    for (const Slots::Run& run : slots.runs) {
      if (!append_first) break;
      const auto part = [&](const auto& all) {
        return std::decay_t<decltype(all)>(all.begin() + run.first,
                                           all.begin() + run.first + run.count);
      };
      NewRows own{rows_of(args.k, run.slot, run.count), rows_of(args.v, run.slot, run.count)};
      RowAddresses borrowed;
      if (rows.borrowed != nullptr) {
        borrowed = rows_of(*rows.borrowed, run.slot, run.count);
        own.borrowed = &borrowed;
      }
      const std::vector<int64_t> lengths(size_t(run.count), 1);
      std::vector<int64_t> begin;
      for (int64_t i = run.first; i < run.first + run.count; ++i) {
        begin.push_back(slots.layers[size_t(i)]->regions.total());
      }
      this->append(part(step.views), begin, lengths, own, stream);
    }
  };
  const auto decode = [&] {
    if (whole) {
      args.sequences = views.data();
      return search_->decode(args, stream);
    }
    for (const Slots::Run& run : slots.runs) {
      DecodeArgs own = args;
      own.batch = run.count;
      own.sequences = step.views.data() + run.first;
      for (TensorView* tensor : {&own.q, &own.k, &own.v, &own.out, &own.lse, &own.error}) {
        *tensor = rows_of(*tensor, run.slot, run.count);
      }
      search_->decode(own, stream);
    }
    if (slots.size() < slots.all) clear_idle(slots, args, stream);
  };
  try {
    offload_beside(step, stream);
    carry_out(step, append, decode, stream);
  } catch (...) {
    forget(at);
    throw;
  }
  at.views = std::move(views);
  const bool counts = backend_->word_updates() != nullptr &&
                      backend_->capabilities().decode_appends && config_.local > 0;
  const int64_t crossing = search_->in_full_below(slots.all);
  for (const size_t i : due) {
    const int64_t steps = counts ? planner_.quiet_steps(*slots.layers[i], crossing) : 0;
    at.quiet_until[i] = steps > 0 ? at.view(i).total + steps : -1;
  }
  at.look(*search_);
  for (const Change& change : step.changes) stats_.flushes += change.entering() > 0;
  if (search_->needs().rows_per_head > 0) stats_.searched_tokens += at.searched;
  stats_.decode_tokens += slots.size();
}

void Cache::Impl::forget(const BatchLayer& at) noexcept {
  for (Layer* layer : at.slots.layers) {
    layer->tables.forget();
    ++layer->generation;
  }
  quiet_steps_.end();
}

}  // namespace pariskv
