// HARD-KV's kernels, as far as the host can tell: which rows are kept is decided by their positions
// alone, and every step checks that they are what they are at home.
#include <algorithm>
#include <cstring>

#include "fake_kept.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kScratch = 1 << 10;

using test::launch;

void choose(const ChoiceCall& call, const ChoiceJob& job, int64_t head) {
  const ModelShape& shape = call.shape;
  std::vector<Row> rows, attended, held;
  if (job.before != nullptr) rows = rows_before(shape.kept(job.before_capacity), job.before, head);
  for (int64_t p = job.added; p < job.zone_end; ++p) {
    rows.push_back({int32_t(p), -1, row_of(*job.sequence, shape, head, p)});
  }
  std::sort(rows.begin(), rows.end(),
            [](const Row& a, const Row& b) { return a.position < b.position; });
  for (const Row& row : rows) {
    const bool wanted = (row.position * 7 + head + job.zone_end) % 3 != 0;
    if (wanted && int64_t(attended.size()) < call.rules.most) {
      attended.push_back({row.position, 0, row.data});
    } else if (row.age >= 0 && row.age < call.rules.patience) {
      held.push_back({row.position, row.age + 1, row.data});
    }
  }
  fill(shape.kept(job.after_capacity), job.after, head, attended, held);
}

void remember(const ModelShape& shape, char* recent, int64_t position) {
  const RecentLayout layout = shape.recent_queries();
  *layout.position(recent, layout.slot_of(position)) = position + 1;
}

}  // namespace

void launch_remember(const RememberCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    for (int64_t i = 0; i < call.positions; ++i) {
      remember(call.shape, call.recent, call.begin + i);
    }
  });
}

ChoiceScratch choice_scratch(const ModelShape&, int64_t width, int64_t, int64_t) {
  ChoiceScratch scratch{};
  scratch.width = width;
  scratch.bytes = kScratch + width;
  return scratch;
}

void launch_choice(const ChoiceCall& call, cudaStream_t stream) {
  launch(stream, [call] {
    std::memset(call.space, 1, size_t(call.count * call.heads * call.scratch.bytes));
    for (int64_t i = 0; i < call.count; ++i) check_asked(call.shape, call.jobs[i]);
  });
  launch(stream, [call] {
    for (int64_t i = 0; i < call.count; ++i) {
      for (int64_t h = 0; h < call.heads; ++h) choose(call, call.jobs[i], call.first_head + h);
    }
  });
}

void launch_trim(const TrimCall& call, cudaStream_t stream) {
  launch(stream, [call] { trim_rows(call); });
}

int64_t kept_decode_bytes(const ModelShape&) { return kScratch; }

void launch_kept_decode(const KeptDecodeCall& call, cudaStream_t stream) {
  const auto each_sequence = [call](auto visit) {
    for (int64_t i = 0; i < call.batch; ++i) {
      const KeptSlot& slot = call.slots[i];
      if (slot.layers != nullptr) visit(slot, slot.layers[call.layer], i);
    }
  };
  launch(stream, [call, each_sequence] {
    each_sequence([&](const KeptSlot& slot, const SequenceView& view, int64_t i) {
      if (!view.dense()) check_kept(view, call.shape);
      std::memset(slot.scratch, int(i + 1), size_t(call.shape.kv_heads * kScratch));
      if (call.k.data != nullptr) append_token(call.shape, view, call.k, call.v, i);
    });
  });
  launch(stream, [call, each_sequence] {
    each_sequence([&](const KeptSlot&, const SequenceView& view, int64_t) {
      if (call.k.data != nullptr) remember(call.shape, view[Part::kRecent], view.total - 1);
    });
  });
}

}  // namespace pariskv::cuda
