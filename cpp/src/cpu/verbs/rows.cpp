// Rows in and out of the store.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/rows.h"

namespace pariskv::cpu {

namespace {

/** Calls `visit(sequence, packed index, position)` for every token, in parallel. */
template <typename Visit>
void each_token(ThreadPool& pool, const RowsArgs& args, Visit visit) {
  // A task is a run of tokens of one sequence, so that a task is worth a thread's while.
  constexpr int64_t kTokens = 256;
  for (int64_t s = 0, packed = 0; s < args.batch; packed += args.lengths[s++]) {
    const int64_t length = args.lengths[s];
    pool.parallel_for((length + kTokens - 1) / kTokens, [&](int64_t task) {
      const int64_t end = std::min(length, (task + 1) * kTokens);
      for (int64_t t = task * kTokens; t < end; ++t) {
        visit(args.sequences[s], packed + t, args.begin[s] + t);
      }
    });
  }
}

}  // namespace

void CpuBackend::append(const RowsArgs& args, Stream) {
  const RowFormat& format = args.shape.rows;
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      char* row = row_at(args.shape, sequence, head, position);
      char* value = row + format.key_bytes();
      std::memcpy(row, element_at(args.k, token, head), size_t(format.key_bytes()));
      std::memcpy(value, element_at(args.v, token, head), size_t(format.value_bytes()));
    }
  });
}

void CpuBackend::read(const RowsArgs& args, Stream) {
  const RowFormat& format = args.shape.rows;
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      const char* row = row_at(args.shape, sequence, head, position);
      const char* value = row + format.key_bytes();
      std::memcpy(element_at(args.k, token, head), row, size_t(format.key_bytes()));
      std::memcpy(element_at(args.v, token, head), value, size_t(format.value_bytes()));
    }
  });
}

void CpuBackend::copy(void* target, const void* source, int64_t bytes, Stream) {
  std::memcpy(target, source, size_t(bytes));
}

void CpuBackend::zero(void* target, int64_t bytes, Stream) {
  std::memset(target, 0, size_t(bytes));
}

void CpuBackend::fetch(void* target, const void* source, int64_t bytes) {
  std::memcpy(target, source, size_t(bytes));
}

}  // namespace pariskv::cpu
