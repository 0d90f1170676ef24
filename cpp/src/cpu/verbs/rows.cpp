// Rows in and out of the store.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/narrow_rows.h"

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
  const ModelShape& shape = args.shape;
  const RowFormat given = RowFormat::plain(shape.rows.key_dim, shape.rows.value_dim, shape.dtype);
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      convert_row(kernels_, {element_at(args.k, token, head), element_at(args.v, token, head)},
                  given, plain_row_at(shape, sequence, head, position), shape.rows);
    }
  });
}

void CpuBackend::read(const RowsArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  each_token(pool_, args, [&](const SequenceView& sequence, int64_t token, int64_t position) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      read_row(kernels_, shape, sequence, head, position,
               {element_at(args.k, token, head), element_at(args.v, token, head)});
    }
  });
}

namespace {

/** Calls `visit(rows, plain, position)` for every row of some jobs, in parallel. */
template <typename Visit>
void each_row(ThreadPool& pool, const Kernels& kernels, const NarrowArgs& args, Visit visit) {
  constexpr int64_t kTokens = 256;  // of a task
  for (int64_t i = 0; i < args.batch; ++i) {
    const NarrowJob& job = args.jobs[i];
    const int64_t count = job.positions.end - job.positions.begin;
    pool.parallel_for((count + kTokens - 1) / kTokens, [&](int64_t task) {
      const int64_t begin = job.positions.begin + task * kTokens;
      const int64_t end = std::min(job.positions.end, begin + kTokens);
      for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
        NarrowRows rows(kernels, args.shape, job.sequence, head);
        for (int64_t position = begin; position < end; ++position) {
          visit(rows, plain_row_at(args.shape, job.sequence, head, position), position);
        }
      }
    });
  }
}

}  // namespace

void CpuBackend::narrow(const NarrowArgs& args, Stream) {
  each_row(pool_, kernels_, args, [](NarrowRows& rows, const RowPlace& plain, int64_t position) {
    rows.write(plain, position);
  });
}

void CpuBackend::widen(const NarrowArgs& args, Stream) {
  each_row(pool_, kernels_, args, [](NarrowRows& rows, const RowPlace& plain, int64_t position) {
    rows.read(position, plain);
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
