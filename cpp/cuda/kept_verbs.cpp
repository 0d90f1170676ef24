// What policies that keep rows share of the backend: recent queries, scratch of choices.
#include "cuda_backend.h"
#include "views.h"

namespace pariskv::cuda {

void CudaBackend::remember(const RememberArgs& args, Stream stream) {
  const DeviceGuard guard(device_);
  for (int64_t i = 0; i < args.batch; ++i) {
    const RememberJob& job = args.jobs[i];
    launch_remember(
        {args.shape, args.logits, job.sequence.recent, job.begin, job.q.shape[0], rows_of(job.q)},
        handle_of(stream));
  }
}

void CudaBackend::reserve(const Upkeep& upkeep) {
  const DeviceGuard guard(device_);
  const int64_t bytes = std::visit([](const auto& args) { return choice_bytes(args); }, upkeep);
  if (bytes <= choices_.bytes()) return;
  choices_ = Block();  // first, so that old and new are never held together
  choices_ = arena_.allocate(bytes);
}

}  // namespace pariskv::cuda
