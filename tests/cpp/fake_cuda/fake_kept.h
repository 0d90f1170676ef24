/** Blocks of kept rows, for kernels that are host code. */
#pragma once

#include <cstring>
#include <vector>

#include "fake.h"
#include "fake_rows.h"

namespace pariskv::cuda {

using test::complain;

/** Where a row to choose from lies, and what it was. */
struct Row {
  int32_t position;
  int age;  // choices that it lost; negative: it was not kept
  const char* data;
};

inline std::vector<Row> rows_before(const KeptLayout& layout, char* block, int64_t head) {
  std::vector<Row> rows;
  const int32_t* counts = layout.counts(block, head);
  for (int64_t i = 0; i < counts[0] + counts[1]; ++i) {
    rows.push_back({layout.positions(block, head)[i], layout.ages(block, head)[i],
                    layout.row(block, head, i)});
  }
  return rows;
}

/** Rows that are attended to, then those that are held. */
inline void fill(const KeptLayout& layout, char* block, int64_t head, std::vector<Row> attended,
                 std::vector<Row> held) {
  layout.counts(block, head)[0] = int32_t(attended.size());
  layout.counts(block, head)[1] = int32_t(held.size());
  attended.insert(attended.end(), held.begin(), held.end());
  if (int64_t(attended.size()) > layout.capacity) return complain("a block is too small");
  for (size_t i = 0; i < attended.size(); ++i) {
    layout.positions(block, head)[i] = attended[i].position;
    layout.ages(block, head)[i] = uint8_t(attended[i].age);
    std::memcpy(layout.row(block, head, int64_t(i)), attended[i].data, size_t(layout.row_bytes));
  }
}

/** The queries that choose are those of the positions that were named. */
inline void check_asked(const ModelShape& shape, const ChoiceJob& job) {
  const RecentLayout layout = shape.recent_queries();
  if (job.asked.begin == kMostTokens) return;  // nobody is asked: a cut took the queries away
  for (int64_t p = job.asked.begin; p < job.asked.end; ++p) {
    char* recent = const_cast<char*>(job.recent);
    if (*layout.position(recent, layout.slot_of(p)) != p + 1) complain("a query is forgotten");
  }
}

/** What a cut leaves of a block. */
inline void trim_rows(const TrimCall& call) {
  for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
    const KeptLayout before = call.shape.kept(call.before_capacity);
    std::vector<Row> attended, held;
    for (const Row& row : rows_before(before, call.before, head)) {
      if (row.position < call.zone_end) (row.age == 0 ? attended : held).push_back(row);
    }
    fill(call.shape.kept(call.after_capacity), call.after, head, attended, held);
  }
}

/** Rows that are attended to are in the zone, in order, and as they are at home. */
inline void check_kept(const SequenceView& view, const ModelShape& shape) {
  if (view[Part::kKept] == nullptr) return complain("a zone is left out, and none of it is kept");
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    int32_t last = -1;
    const auto rows = rows_before(shape.kept(view.kept_capacity), view[Part::kKept], head);
    const int32_t attended = shape.kept(view.kept_capacity).counts(view[Part::kKept], head)[0];
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t position = rows[i].position;
      if (i == size_t(attended)) last = -1;
      if (position <= last || position < view.zone_begin || position >= view.zone_end) {
        return complain("a kept row is not where it should be");
      }
      last = position;
      if (view.rows[position / shape.segment_tokens] == nullptr) continue;  // it was dropped
      const char* home = row_of(view, shape, head, position);
      if (std::memcmp(rows[i].data, home, size_t(shape.rows.bytes())) != 0) {
        return complain("a kept row is not the one at home");
      }
    }
  }
}

}  // namespace pariskv::cuda
