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
  if (options.dense && args.lse.data != nullptr) {
    fail("[decode] lse: expected none beside dense, whose kernel tells none");
  }
  return args;
}

void Cache::Impl::decode_paged(DecodeArgs args, Stream stream) {
  if (search_->needs().leaves_dense) return search_->decode(args, stream);
  (*args.paged->dense)();  // of no sequence
  args.paged = nullptr;
  search_->decode(args, stream);
}

void Cache::Impl::decode(int64_t layer, const Batch& sequences, const StepTensors& tensors,
                         bool appends, const AttendOptions& options, Stream stream) {
  const Lock lock(*this, Lock::Layers::kUntold);
  const Verb verb = this->verb(tensors.rows.borrowed == nullptr ? "decode" : "decode_rows");
  verb.check_layer(layer);
  const LayerRange range{layer, 1};
  open_step(verb, sequences, range);
  const BatchLayer& at = cursor_.layer(layer);
  const Slots& slots = at.slots;
  DecodeArgs args = decode_args(verb, layer, slots, tensors, appends, options);

  PagedStep paged{};
  if (options.dense) {
    PageTables& tables = page_tables(verb, "dense");
    paged.table = tables.rows(verb, options.page_rows, slots.all);
    paged.dense = &options.dense;
    args.paged = &paged;
    if (backend_->capturing(stream) && !options.page_rows.empty()) {
      fail(
          "[decode] page_rows: expected none in a decode that is captured: the slots of a graph "
          "have the first rows of the page table, in order");
    }
  }

  if (backend_->capturing(stream)) {  // a replay reads the lengths of its time
    cursor_.settle();
    const int64_t near_from = batch_of(at, 0).near_from;
    std::vector<SequenceView> views;
    for (const Layer* target : slots.layers) {
      views.push_back(target->view(sizes_, *search_, near_from));
    }
    views = slots.spread(views.data());
    args.sequences = views.data();
    return args.paged ? decode_paged(args, stream) : search_->decode(args, stream);
  }

  const int64_t tokens = appends ? 1 : 0;
  for (size_t i = 0; at.left < tokens && i < slots.layers.size(); ++i) {
    const int64_t total = at.view(i).total;
    if (!appends && total == 0) {
      fail("[decode] sequences: expected tokens to attend to, but ",
           sequences.ids()[size_t(slots.numbers[i])], " has none in layer ", layer,
           "; or pass k and v");
    }
    verb.check_total(total + tokens);
  }
  const Visit visit(*this, stream, Visit::Steps::kGoOn);
  // Without a local window the token itself may enter the zone: its row has to be there first.
  const bool append_first =
      appends && (!backend_->capabilities().decode_appends || config_.local == 0);
  StepWork work{args, {}, {}};
  if (append_first) {
    work.append = [&](const auto& views) { append_step(slots, views, args, tensors.rows, stream); };
  }
  work.launch = [&](const auto& views) { launch_step(slots, views, args, stream); };
  take_step(range, tokens, work, stream);
}

void Cache::Impl::append_step(const Slots& slots, const std::vector<SequenceView>& views,
                              const DecodeArgs& args, const NewRows& rows, Stream stream) {
  for (const Slots::Run& run : slots.runs) {
    const auto first = views.begin() + run.slot;
    const std::vector<SequenceView> own(first, first + run.count);
    std::vector<int64_t> begin;
    for (const SequenceView& view : own) begin.push_back(view.total - 1);
    NewRows part{rows_of(args.k, run.slot, run.count), rows_of(args.v, run.slot, run.count)};
    RowAddresses borrowed;
    if (rows.borrowed != nullptr) {
      borrowed = rows_of(*rows.borrowed, run.slot, run.count);
      part.borrowed = &borrowed;
    }
    append(own, begin, std::vector<int64_t>(size_t(run.count), 1), part, stream);
  }
}

void Cache::Impl::launch_step(const Slots& slots, const std::vector<SequenceView>& views,
                              DecodeArgs args, Stream stream) {
  args.sequences = views.data();
  if (args.paged != nullptr) {
    PagedStep paged = *args.paged;
    std::vector<int32_t> lengths(size_t(slots.all), 0);
    for (size_t i = 0; i < slots.layers.size(); ++i) {
      const SequenceView& view = views[size_t(slots.numbers[i])];
      const bool served = view.dense() && search_->needs().leaves_dense &&
                          page_tables_->serve(slots.layers[i]->near(), view.total);
      if (served) lengths[size_t(slots.numbers[i])] = int32_t(view.total);
      paged.unserved += !served;
    }
    backend_->set_lengths(paged.table, lengths.data(), slots.all, stream);
    args.paged = &paged;
    return decode_paged(args, stream);
  }
  if (backend_->capabilities().graphs) return search_->decode(args, stream);
  // No kernel knows idle slots: a step is made of the runs between them.
  for (const Slots::Run& run : slots.runs) {
    DecodeArgs own = args;
    own.batch = run.count;
    own.sequences = views.data() + run.slot;
    for (TensorView* tensor : {&own.q, &own.k, &own.v, &own.out, &own.lse, &own.error}) {
      *tensor = rows_of(*tensor, run.slot, run.count);
    }
    search_->decode(own, stream);
  }
  if (slots.size() < slots.all) clear_idle(slots, args, stream);
}

}  // namespace pariskv
