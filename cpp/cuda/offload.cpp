#include "offload.h"

namespace pariskv::cuda {

Event Offload::take_event() {
  if (spare_.empty()) return Event();
  Event event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

int64_t Offload::start(const std::vector<RowCopy>& copies, cudaStream_t stream) {
  Event arrived = take_event();
  written_.record(stream);
  written_.make_wait(stream_);
  try {
    check(runtime().copy_rows(copies.data(), int64_t(copies.size()), stream_),
          "copy rows to host memory");
    arrived.record(stream_);
  } catch (...) {
    sync_ignoring_errors(stream_);  // some may be under way, and nobody would wait for them
    throw;
  }
  under_way_.push_back({last_ + 1, std::move(arrived)});
  return ++last_;
}

bool Offload::done(int64_t ticket) {
  while (!under_way_.empty() && under_way_.front().arrived.passed()) {
    spare_.push_back(std::move(under_way_.front().arrived));
    under_way_.pop_front();
  }
  return under_way_.empty() || ticket < under_way_.front().ticket;
}

void Offload::wait(int64_t ticket) {
  for (const Copies& copies : under_way_) {
    if (copies.ticket == ticket) copies.arrived.wait();
  }
  done(ticket);
}

}  // namespace pariskv::cuda
