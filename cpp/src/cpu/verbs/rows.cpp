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
  const RowFormat& rows = args.shape.rows;
  const RowType type = row_type(args.shape.dtype);
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      const RowPlace row = plain_row_at(args.shape, sequence, head, position);
      convert_half(kernels_, rows.key_dim, {element_at(args.k, token, head), type},
                   {row.key, rows.key});
      convert_half(kernels_, rows.value_dim, {element_at(args.v, token, head), type},
                   {row.value, rows.value});
    }
  });
}

void CpuBackend::read(const RowsArgs& args, Stream) {
  const RowType type = row_type(args.shape.dtype);
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    const RowFormat& rows = format_at(args.shape, sequence, position);
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      const RowPlace row = row_at(args.shape, sequence, head, position);
      convert_half(kernels_, rows.key_dim, {row.key, rows.key},
                   {element_at(args.k, token, head), type});
      convert_half(kernels_, rows.value_dim, {row.value, rows.value},
                   {element_at(args.v, token, head), type});
    }
  });
}

void CpuBackend::narrow(const NarrowArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  constexpr int64_t kTokens = 256;  // of a task
  for (int64_t i = 0; i < args.batch; ++i) {
    const NarrowJob& job = args.jobs[i];
    const int64_t count = job.positions.end - job.positions.begin;
    pool_.parallel_for((count + kTokens - 1) / kTokens, [&](int64_t task) {
      const int64_t begin = job.positions.begin + task * kTokens;
      const int64_t end = std::min(job.positions.end, begin + kTokens);
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        for (int64_t position = begin; position < end; ++position) {
          const RowPlace from = plain_row_at(shape, job.sequence, head, position);
          const RowPlace to = row_at(shape, job.sequence, head, position);
          convert_half(kernels_, shape.rows.key_dim, {from.key, shape.rows.key},
                       {to.key, shape.narrow.key});
          convert_half(kernels_, shape.rows.value_dim, {from.value, shape.rows.value},
                       {to.value, shape.narrow.value});
        }
      }
    });
  }
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
