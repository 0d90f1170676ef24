#include "kept/memory.h"

#include "views.h"

namespace pariskv::cuda {

void remember(CudaBackend& backend, const RememberArgs& args, Stream stream) {
  const DeviceGuard guard(backend.device());
  for (int64_t i = 0; i < args.batch; ++i) {
    const RememberJob& job = args.jobs[i];
    launch_remember({args.shape, args.logits, job.sequence[Part::kRecent], job.begin,
                     job.q.shape[0], rows_of(job.q)},
                    handle_of(stream));
  }
}

void ChoiceMemory::reserve(int64_t bytes) {
  const DeviceGuard guard(backend_.device());
  if (bytes <= block_.bytes()) return;
  block_ = Block();
  block_ = backend_.arena().allocate(bytes);
}

}  // namespace pariskv::cuda
