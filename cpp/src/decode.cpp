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

Cache::Impl::Slots::Slots(const std::vector<Layer*>& found) : all(int64_t(found.size())) {
  for (int64_t slot = 0; slot < all; ++slot) {
    if (found[size_t(slot)] == nullptr) continue;
    if (runs.empty() || numbers.back() + 1 != slot) {
      runs.push_back({slot, int64_t(layers.size()), 0});
    }
    ++runs.back().count;
    layers.push_back(found[size_t(slot)]);
    numbers.push_back(slot);
  }
}

std::vector<SequenceView> Cache::Impl::Slots::spread(const SequenceView* views) const {
  std::vector<SequenceView> spread(size_t(all), SequenceView{});
  for (const int64_t slot : numbers) spread[size_t(slot)] = *views++;
  return spread;
}

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

void Cache::Impl::decode(int64_t layer, const Batch& sequences, const StepTensors& tensors,
                         bool appends, const AttendOptions& options, Stream stream) {
  const Lock lock(*this);
  const Verb verb = this->verb(tensors.rows.borrowed == nullptr ? "decode" : "decode_rows");
  const Slots slots(find_layers(verb, sequences, layer, IdleSlots::kAllowed));
  const std::vector<Layer*>& layers = slots.layers;
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

  std::vector<SequenceView> views;
  if (backend_->capturing(stream)) {  // a replay reads the lengths of its time
    for (const Layer* target : layers) views.push_back(view(*target));
    views = slots.spread(views.data());
    args.sequences = views.data();
    search_->decode(args, stream);
    return;
  }

  std::vector<Regions> next;
  std::vector<int64_t> begin;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Regions& regions = layers[i]->regions;
    if (!appends && regions.total() == 0) {
      fail("[decode] sequences: expected tokens to attend to, but ",
           sequences.ids()[size_t(slots.numbers[i])], " has none in layer ", layer,
           "; or pass k and v");
    }
    next.push_back(appends ? regions.grown(1, sizes_) : regions);
    verb.check_total(next.back().total());
    begin.push_back(regions.total());
  }
  const Visit visit(*this, stream);
  reserved_for_.clear();
  // Where graphs are, kernels know idle slots. Elsewhere a step is made of the runs between them.
  const bool whole = backend_->capabilities().graphs;
  Step step = plan(layers, next, Planner::Use::kDecode, stream, false, [&](Step& planned) {
    DecodeArgs needs = args;
    if (whole) views = slots.spread(planned.views.data());
    needs.batch = whole ? slots.all : int64_t(layers.size());
    needs.sequences = whole ? views.data() : planned.views.data();
    if (needs.batch > 0) search_->reserve(needs);
  });
  offload_beside(step, stream);

  // Without a local window the token itself may enter the zone: its row has to be there first.
  const bool append_first =
      appends && (!backend_->capabilities().decode_appends || config_.local == 0);
  const auto append = [&] {
    for (const Slots::Run& run : slots.runs) {
      if (!append_first) break;
      const auto part = [&](const auto& all) {
        return std::decay_t<decltype(all)>(all.begin() + run.first,
                                           all.begin() + run.first + run.count);
      };
      NewRows rows{rows_of(args.k, run.slot, run.count), rows_of(args.v, run.slot, run.count)};
      RowAddresses borrowed;
      if (tensors.rows.borrowed != nullptr) {
        borrowed = rows_of(*tensors.rows.borrowed, run.slot, run.count);
        rows.borrowed = &borrowed;
      }
      const std::vector<int64_t> lengths(size_t(run.count), 1);
      this->append(part(step.views), part(begin), lengths, rows, stream);
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
    if (int64_t(layers.size()) < slots.all) clear_idle(slots, args, stream);
  };
  carry_out(step, append, decode, stream);
  count_step(step, slots.all);
}

}  // namespace pariskv
