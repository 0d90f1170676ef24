// The kernels' part, as far as the host can tell: rows are moved, summaries marked, statistics
// counted; a decode touches all that a real one would and checks that it is as it should be.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/backend.h"
#include "conditional.h"
#include "fake.h"
#include "fake_rows.h"
#include "policy/pariskv/plan.h"

namespace pariskv {

test::Told& test::told() {
  static Told told;
  return told;
}

namespace cpu {
/** Searches of the CPU, which are not here, need what those of a GPU need. */
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  Config own = config;
  own.device = {DeviceType::kCuda, test::kDevice};
  return cuda::make_backend(own, resources);
}
}  // namespace cpu

namespace cuda {

namespace {

constexpr int64_t kScratch = 1 << 14;

using test::complain;
using test::launch;

void check_zone(const SequenceView& view, const SummaryLayout& layout, const ParisKVSlot& slot) {
  for (int64_t p = view.zone_begin; p < view.zone_end; ++p) {
    uint8_t* block = view.summaries[p / layout.tokens];
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      if (*layout.norms(block, head, p % layout.tokens) != 1) complain("a key has no summary");
    }
  }
  if (view.zone_tokens() > 0 &&
      *reinterpret_cast<int64_t*>(view[Part::kState]) != view.zone_tokens()) {
    complain("the statistics do not count the zone's keys");
  }
  if (view.dense()) return;
  if (view.zone_tokens() > slot.zone_capacity ||
      ParisKVPlan::of(view).candidates > slot.candidate_capacity) {
    complain("a slot has too little scratch");
  }
}

/** Whether rows of the zone are in host memory. */
bool is_fetched(const SequenceView& view, const ModelShape& shape) {
  for (int64_t p = view.zone_begin; p < view.zone_end; p += shape.segment_tokens) {
    if (test::is_pinned(zone_row_of(view, shape, 0, p))) return true;
  }
  return false;
}

/** Some rows of the zone, as if selected: those in the row cache must be those at home. */
void use_row_cache(const SequenceView& view, const ModelShape& shape, int64_t first) {
  if (shape.cached_rows > 0 && view[Part::kRowCache] == nullptr && is_fetched(view, shape)) {
    complain("there is no row cache");
  }
  if (view[Part::kRowCache] == nullptr) return;
  const RowCacheLayout layout = shape.row_cache();
  auto* all_tags = reinterpret_cast<uint64_t*>(view[Part::kRowCache]);
  auto* all_stamps = reinterpret_cast<uint32_t*>(view[Part::kRowCache] + layout.stamps());
  for (int64_t i = 0; i < shape.kv_heads * layout.slots; ++i) {
    if (int64_t(all_tags[i] >> 32) > view.generation) complain("a row cache is not empty at first");
    if (all_tags[i] == 0 && all_stamps[i] != 0) complain("a row cache has stamps at first");
  }
  const int64_t bytes = shape.zone_rows().bytes(), sets = layout.slots / kCacheWays;
  for (int64_t p = view.zone_begin + first; p < view.zone_end; p += 3) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const uint64_t tag = uint64_t(view.generation) << 32 | uint64_t(p + 1);
      const int64_t set = head * layout.slots + p % sets * kCacheWays;
      const char* home = zone_row_of(view, shape, head, p);
      const uint64_t* found = std::find(all_tags + set, all_tags + set + kCacheWays, tag);
      const int64_t place = found - all_tags;
      char* rows = view[Part::kRowCache] + layout.rows();
      if (place < set + kCacheWays) {
        const char* cached = rows + place * layout.row_bytes;
        if (std::memcmp(cached, home, size_t(bytes)) != 0) complain("a row is stale");
      } else if (p + 1 < view.total) {
        const int64_t taken = set + p / sets % kCacheWays;
        all_tags[taken] = tag;
        all_stamps[taken] = uint32_t(view.total);
        std::memcpy(rows + taken * layout.row_bytes, home, size_t(bytes));
      }
    }
  }
}

/** What is kept of a row in 8 bits: the first number of K and of V, as they are. */
void narrow_row(const ModelShape& shape, const char* from, char* to) {
  const size_t size = size_t(size_of(shape.dtype));
  std::memcpy(to, from, size);
  std::memcpy(to + size, from + shape.rows.key_bytes(), size);
}

/** As `narrow_row` leaves it. */
std::vector<char> tail_copy_of(const SequenceView& view, const ModelShape& shape, int64_t head,
                               int64_t position) {
  const char* home = zone_row_of(view, shape, head, position);
  const size_t two = size_t(2 * size_of(shape.dtype));
  if (shape.narrows()) return {home, home + two};
  std::vector<char> copy(two);
  narrow_row(shape, home, copy.data());
  return copy;
}

/** Copies of the tail's rows are of what these are at home. */
void check_tail(const SequenceView& view, const DecodeCall& call) {
  const ModelShape& shape = call.shape;
  const Tail tail =
      Tail::of(view.zone_begin, view.zone_end, call.tail_rows, uint32_t(view.tail_seed));
  if (view[Part::kTailCopies] == nullptr) {
    if (tail.count > 0 && !call.explains) complain("the tail has no copies");
    return;
  }
  for (int64_t i = 0; i < tail.count; ++i) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const TailCopies copies = shape.tail_copies(Tail::capacity(call.tail_rows));
      const std::vector<char> wanted = tail_copy_of(view, shape, head, tail.position(i));
      const char* copy = view[Part::kTailCopies] + copies.row_offset(head, i);
      if (std::memcmp(copy, wanted.data(), wanted.size()) != 0) {
        complain("a copy of the tail is stale");
      }
    }
  }
}

/** Scratch comes as zeros, and then is a slot's own until that has more. */
void use_scratch(const ParisKVSlot& slot, int64_t i) {
  const int64_t mine = (slot.zone_capacity << 32) + slot.candidate_capacity * 64 + i + 1;
  uint8_t* const scratch = slot.scratch.scores;
  int64_t whose = 0;
  std::memcpy(&whose, scratch, sizeof whose);
  const auto used = [](uint8_t byte) { return byte != 0; };
  if (whose != mine && std::any_of(scratch, scratch + kScratch, used)) {
    complain("scratch does not come as zeros");
  }
  std::memset(scratch, int(i + 1), size_t(kScratch));
  std::memcpy(scratch, &mine, sizeof mine);
}

void decode(const DecodeCall& call) {
  for (int64_t head = call.first_head; head < call.first_head + call.heads; ++head) {
    const int64_t i = head / call.shape.kv_heads;
    const ParisKVSlot& slot = call.slots[i];
    // Whoever has the first head of a sequence does what is to be done once.
    if (slot.layers == nullptr || head % call.shape.kv_heads != 0) continue;
    const SequenceView& view = slot.layers[call.layer];
    check_zone(view, call.codec.layout, slot);
    if (!view.dense()) use_row_cache(view, call.shape, std::rand() % 3);
    if (!view.dense()) check_tail(view, call);
    use_scratch(slot, i);
    int64_t touched = 0;
    for (int64_t p = 0; p < view.total; p += 5) {
      const bool of_zone = p >= view.zone_begin && p < view.zone_end;
      touched += *(of_zone ? zone_row_of : row_of)(view, call.shape, 0, p);
    }
    slot.scratch.scores[kScratch - 1] = uint8_t(touched);
    if (call.k.data == nullptr) continue;
    append_token(call.shape, view, call.k, call.v, i);
  }
}

}  // namespace

bool has_code_for(int major, int) { return major >= 8; }
std::string code_text() { return "8.0 and newer"; }

void launch_word_updates(const WordUpdate* updates, int64_t count, cudaStream_t stream) {
  test::told().words += count;
  launch(stream, [words = std::vector<WordUpdate>(updates, updates + count)] {
    for (const WordUpdate& word : words) *word.target = word.value;
  });
}

void launch_add_token(SequenceView* const* views, int64_t count, int64_t layers,
                      cudaStream_t stream) {
  test::told().tokens += count * layers;
  launch(stream, [layers, of = std::vector<SequenceView*>(views, views + count)] {
    for (SequenceView* first : of) {
      for (int64_t l = 0; l < layers; ++l) ++first[l].total;
    }
  });
}

void launch_append(const RowsCall& call, cudaStream_t stream) {
  launch(stream, [call, items = std::vector<RowsItem>(call.items, call.items + call.count)] {
    append_rows(call, items);
  });
}

void launch_read(const RowsCall& call, cudaStream_t stream) {
  launch(stream, [call, items = std::vector<RowsItem>(call.items, call.items + call.count)] {
    each_row_part(call, items, [](char* row, char* outside, int64_t bytes) {
      std::memcpy(outside, row, size_t(bytes));
    });
  });
}

void launch_set_lengths(int32_t* lengths, const int32_t* rows, const int32_t* values, int64_t count,
                        cudaStream_t stream) {
  std::vector<std::pair<int64_t, int32_t>> some;
  for (int64_t i = 0; i < count; ++i) some.emplace_back(rows == nullptr ? i : rows[i], values[i]);
  launch(stream, [some, lengths] {
    for (const auto& [row, value] : some) lengths[row] = value;
  });
}

// All numbers of a K or V are alike: a narrow row has one of each.

void launch_narrow(const NarrowCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    for (int64_t p = call.begin; p < call.end; ++p) {
      for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
        narrow_row(call.shape, row_of(*call.sequence, call.shape, head, p),
                   zone_row_of(*call.sequence, call.shape, head, p));
      }
    }
  });
}

void launch_widen(const WidenCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    const ModelShape& shape = call.shape;
    const int64_t size = size_of(shape.dtype);
    for (int64_t i = 0; i < call.tokens; ++i) {
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const char* row =
            call.segment + (head * shape.segment_tokens + call.slot + i) * shape.narrow.bytes();
        const auto fill = [&](const Rows& rows, int64_t dim, const char* number) {
          char* to = rows.data + (i * rows.stride_i + head * rows.stride_j) * size;
          for (int64_t d = 0; d < dim; ++d) std::memcpy(to + d * size, number, size_t(size));
        };
        fill(call.k, shape.rows.key_dim, row);
        fill(call.v, shape.rows.value_dim, row + size);
      }
    }
  });
}

void launch_paged_step(const DecodeCall& call, const PageFill& fill, const int32_t* page_rows,
                       const DenseChoice&, cudaStream_t stream) {
  launch(stream, [call, fill, page_rows] {
    int64_t named = 0;
    for (int64_t s = 0; s < call.batch; ++s) {
      const SequenceView* layers = call.slots[s].layers;
      if (layers == nullptr) continue;
      const int64_t row = page_rows == nullptr ? s : page_rows[s];
      const SequenceView& view = layers[call.layer];
      if (fill.lengths[row] == 0) {
        call.searched_rows[named++] = int32_t(s);
        continue;
      }
      if (fill.lengths[row] != view.total) complain("a length that is not the sequence's");
      if (!view.dense()) complain("pages of a sequence that is searched");
      fill_page_row(fill, call.shape, view, row, view.total);
      if (call.k.data != nullptr) append_token(call.shape, view, call.k, call.v, s);
    }
    for (; named < call.batch; ++named) call.searched_rows[named] = -1;
  });
}

void launch_copy_tail(const TailCopyCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    const TailCopies copies = call.shape.tail_copies(Tail::capacity(call.tail_rows));
    for (int64_t i = call.from; i < call.tail.count; ++i) {
      for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
        const std::vector<char> copy =
            tail_copy_of(*call.sequence, call.shape, head, call.tail.position(i));
        char* to = (*call.sequence)[Part::kTailCopies] + copies.row_offset(head, i);
        std::memcpy(to, copy.data(), copy.size());
      }
    }
  });
}

void launch_copies(const RowCopy* copies, int64_t count, cudaStream_t stream) {
  launch(stream, [some = std::vector<RowCopy>(copies, copies + count)] {
    for (const RowCopy& copy : some) {
      if (copy.bytes % 16 != 0) complain("a copy of broken pieces");
      std::memmove(copy.target, copy.source, size_t(copy.bytes));
    }
  });
}

void launch_clear(const Cleared* blocks, int64_t count, cudaStream_t stream) {
  if (count > kMostCleared) complain("more blocks to zero than arguments have room for");
  launch(stream, [some = std::vector<Cleared>(blocks, blocks + count)] {
    for (const Cleared& block : some) std::memset(block.data, 0, size_t(block.bytes));
  });
}

void launch_balance(const EncodeCall&, cudaStream_t stream) {
  launch(stream, [] {});
}

void launch_narrow_base(const EncodeCall&, void*, cudaStream_t stream) {
  launch(stream, [] {});
}

void launch_means(const EncodeCall&, cudaStream_t stream) {
  launch(stream, [] {});
}

void launch_observe(const ObserveCall& call, cudaStream_t stream) {
  launch(stream, [call] { *call.squares += float(call.positions); });
}

void launch_encode(const EncodeCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    const SummaryLayout layout = call.codec.layout;
    for (int64_t p = call.begin; p < call.end; ++p) {
      for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
        uint8_t* block = call.sequence->summaries[p / layout.tokens];
        *layout.norms(block, head, p % layout.tokens) = 1;
      }
    }
  });
}

void launch_tally(const EncodeCall& call, int64_t direction, cudaStream_t stream) {
  launch(stream, [call, direction] {
    for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
      call.statistics.usable[head] += direction * (call.end - call.begin);
    }
  });
}

// Graphs without conditions: their work is recorded as ever.
Conditional::Conditional(cudaStream_t stream, int) : stream_(stream) {}
void Conditional::add_node() {}
void Conditional::begin(int, cudaStream_t) {}
void Conditional::end(cudaStream_t) {}
void Conditional::abandon(cudaStream_t) noexcept {}
void Conditional::follow() {}

bool has_dense(const DecodeCall&) { return false; }
void launch_dense(const DecodeCall&, const DenseChoice&, cudaStream_t) {}

void launch_decode(const DecodeCall& call, cudaStream_t stream) {
  launch(stream, [call] { decode(call); });
}

SlotScratch lay_out_scratch(char* base, const ModelShape&, const ParisKVRules&,
                            int64_t zone_capacity, int64_t) {
  SlotScratch scratch{};
  scratch.first.scores = reinterpret_cast<uint8_t*>(base);
  scratch.head_bytes = kScratch + zone_capacity;
  return scratch;
}

void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    const SequenceView& view = *call.sequence;
    if (view.total < call.total) complain("host and device differ in a length");
    if (call.end > call.total || call.begin >= call.end) complain("attends to no rows");
    if (call.staged == nullptr) return;
    const int64_t bytes = call.shape.row_block_bytes(), tokens = call.shape.segment_tokens;
    for (int64_t s = call.begin / tokens; s * tokens < call.end; ++s) {
      const char* brought = call.staged + (s - call.staged_segment) * bytes;
      if (call.shape.narrows()) continue;  // they are plain only there
      if (std::memcmp(brought, view.rows[s], size_t(bytes)) != 0) {
        complain("rows are attended to that have not arrived");
      }
    }
  });
}
void launch_finish_exact(const AttendExactCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    if (call.states == nullptr) complain("there is nothing to finish");
  });
}
int64_t exact_state_floats(const ModelShape& shape) { return shape.rows.value_dim + 2; }
int64_t exact_block_queries(const AttendExactCall&) { return 128; }

void launch_exact_logits(const ExactLogitsCall&, cudaStream_t stream) {
  launch(stream, [] {});
}

}  // namespace cuda
}  // namespace pariskv
