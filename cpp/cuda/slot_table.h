/**
 * The slots of a batch, in the device's memory: which sequence each decodes, and its scratch. The
 * host writes words that changed, in stream order, so a captured graph reads those of its time.
 */
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_backend.h"
#include "tables.h"

namespace pariskv::cuda {

/** What a sequence asks of a slot's scratch: counts, which have a meaning by policy. */
using Demand = std::array<int64_t, 2>;

/** Bytes of scratch up to which slots keep what longer sequences needed. */
inline int64_t& kept_scratch_bytes() {
  static int64_t bytes = int64_t{128} << 20;
  return bytes;
}

/** @tparam Slot  a BatchSlot and what a policy adds, in words of 8 bytes */
template <typename Slot>
class SlotTable {
 public:
  explicit SlotTable(CudaBackend& backend)
      : backend_(backend),
        device_(backend.zeroed_block((kMostBatch + 1) * int64_t(sizeof(Slot)))) {}

  /** (batch), in the device's memory. */
  const Slot* data() const { return device_.as<Slot>(); }
  /** The slot of a sequence that is explained, beside whatever is being decoded. */
  const Slot* explained() const { return data() + kMostBatch; }
  const Slot& sent_to_explain() const { return explaining_.sent; }

  /**
   * Gives each sequence of a step its slot.
   * @param rooms  rooms.demand(sequence) is what a step of it needs, rooms.capacity(slot) what the
   *               slot's scratch is for, rooms.with_room(count) what is taken for so many, and
   *               rooms.make(slot, demand) makes scratch for at least that, and says so in the slot
   */
  template <typename Rooms>
  void reserve(const DecodeArgs& args, const Rooms& rooms) {
    if (args.traced) return set(kMostBatch, args, args.sequences[0], rooms);
    check_batch(args.batch);
    if (int64_t(rows_.size()) < args.batch) rows_.resize(size_t(args.batch));
    if (scratch_bytes() > kept_scratch_bytes()) thin(args, rooms);
    if (args.changed != nullptr) {
      const SequenceView* sequence = args.sequences;
      for (const int64_t i : *args.changed) set(i, args, *sequence++, rooms);
      return;
    }
    for (int64_t i = 0; i < args.batch; ++i) set(i, args, args.sequences[i], rooms);
    // Slots beyond are idle: a graph may have more of them.
    for (int64_t i = args.batch; i < int64_t(rows_.size()); ++i) set_idle(i);
  }

  /** A recorded decode has not been reserved for. */
  static void check_batch(int64_t batch) {
    if (batch <= kMostBatch) return;
    fail("[decode] sequences: expected at most ", kMostBatch, " at a time on a GPU, got ", batch);
  }

  int64_t scratch_bytes() const {
    int64_t bytes = explaining_.scratch.taken();
    for (const Row& row : rows_) bytes += row.scratch.taken();
    return bytes;
  }

  /** Scratch of steps stays where it is: a captured graph may be replayed before its slots are told
   * of another. */
  void clear(Stream stream) {
    std::vector<Cleared> held;
    for (const Row& row : rows_) {
      if (row.scratch.taken() > 0) held.push_back({row.scratch.data(), row.scratch.taken()});
    }
    backend_.zero(held, stream);
    explaining_.scratch = Block();
  }

 private:
  static constexpr int64_t kMostBatch = 4096;

  /** A slot as the host knows it. */
  struct Row {
    Slot sent{};
    Block scratch;
    // Of the sequence that it had last: one layer is reserved for after the other, and may need
    // more than the next.
    const SequenceView* layers = nullptr;
    Demand demand{};

    Demand demand_of(const SequenceView* own, const Demand& asked) const {
      if (own != layers) return asked;
      return {std::max(asked[0], demand[0]), std::max(asked[1], demand[1])};
    }
    bool lacks(const Demand& asked, const Demand& capacity) const {
      return scratch.data() == nullptr || asked[0] > capacity[0] || asked[1] > capacity[1];
    }
  };
  Row& row(int64_t i) { return i == kMostBatch ? explaining_ : rows_[size_t(i)]; }

  /** Null: an idle slot. */
  static const SequenceView* layers_of(const DecodeArgs& args, const SequenceView& sequence) {
    return sequence.device == nullptr ? nullptr : sequence.device - args.layer;
  }

  /**
   * Before a slot takes more, takes scratch that nobody needs, so that all slots together have
   * about what the present sequences do, and not what the longest one of each did.
   */
  template <typename Rooms>
  void thin(const DecodeArgs& args, const Rooms& rooms) {
    bool more = false;
    std::vector<int64_t> spare;
    std::vector<const SequenceView*> given(rows_.size());
    for (int64_t n = 0; n < (args.changed ? int64_t(args.changed->size()) : args.batch); ++n) {
      given[size_t(args.changed ? (*args.changed)[size_t(n)] : n)] = args.sequences + n;
    }
    for (int64_t i = 0; i < int64_t(rows_.size()); ++i) {
      const SequenceView* sequence = given[size_t(i)];
      const bool stays = args.changed != nullptr && sequence == nullptr;
      const SequenceView* layers = stays                 ? row(i).sent.layers
                                   : sequence == nullptr ? nullptr
                                                         : layers_of(args, *sequence);
      if (layers == nullptr) {
        spare.push_back(i);
        continue;
      }
      const Demand asked =
          stays ? row(i).demand : row(i).demand_of(layers, rooms.demand(*sequence));
      const Demand capacity = rooms.capacity(row(i).sent);
      const auto ample = [&](size_t j) { return capacity[j] > 2 * rooms.with_room(asked[j]); };
      more = more || row(i).lacks(asked, capacity);
      if (ample(0) || ample(1)) spare.push_back(i);
    }
    if (!more) return;
    for (const int64_t i : spare) {
      set_idle(i);  // before its scratch is another's
      row(i).scratch = Block();
    }
  }

  template <typename Rooms>
  void set(int64_t i, const DecodeArgs& args, const SequenceView& sequence, const Rooms& rooms) {
    const SequenceView* layers = layers_of(args, sequence);
    if (layers == nullptr) return set_idle(i);
    Row& own = row(i);
    own.demand = own.demand_of(layers, rooms.demand(sequence));
    own.layers = layers;
    Slot slot = own.scratch.data() == nullptr ? Slot{} : own.sent;
    slot.layers = layers;
    if (own.lacks(own.demand, rooms.capacity(own.sent))) {
      own.scratch = rooms.make(slot, own.demand);
    }
    send(i, slot);
  }

  void set_idle(int64_t i) {
    Slot slot = row(i).sent;
    slot.layers = nullptr;
    send(i, slot);
  }

  void send(int64_t i, const Slot& slot) {
    constexpr size_t kWords = sizeof(Slot) / 8;
    static_assert(sizeof(Slot) % 8 == 0);
    Slot& sent = row(i).sent;
    uint64_t before[kWords], after[kWords];
    std::memcpy(before, &sent, sizeof sent);
    std::memcpy(after, &slot, sizeof slot);
    auto* target = reinterpret_cast<uint64_t*>(device_.template as<Slot>() + i);
    for (size_t word = 0; word < kWords; ++word) {
      if (before[word] != after[word]) backend_.update_word(target + word, after[word]);
    }
    sent = slot;
  }

  CudaBackend& backend_;
  Block device_;
  std::vector<Row> rows_;
  Row explaining_;
};

/** Half as much again as asked, so that a growing zone asks rarely: it is a cudaMalloc. */
inline int64_t with_room(int64_t count, int64_t multiple) {
  return (count + count / 2 + multiple - 1) / multiple * multiple;
}

/** Counters of decodes, in the device's memory. */
class Counters {
 public:
  /** @param beside  bytes behind the counters, for who would take a memory block of its own */
  explicit Counters(CudaBackend& backend, int64_t beside = 0)
      : backend_(backend), block_(backend.zeroed_block(int64_t(sizeof(DecodeCounts)) + beside)) {}

  int64_t* data() const { return block_.as<int64_t>(); }
  void* beside() const { return block_.as<DecodeCounts>() + 1; }
  DecodeCounts read() {
    DecodeCounts counts;
    backend_.fetch(&counts, block_.data(), int64_t(sizeof counts));
    return counts;
  }

 private:
  CudaBackend& backend_;
  Block block_;
};

}  // namespace pariskv::cuda
