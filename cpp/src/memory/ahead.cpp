#include "memory/ahead.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>

#include "process.h"

namespace pariskv {

struct Ahead::Shared {
  Shared(std::shared_ptr<MemoryResource> from, int64_t aligned_to)
      : resource(std::move(from)), alignment(aligned_to) {}

  const std::shared_ptr<MemoryResource> resource;
  const int64_t alignment;
  std::mutex mutex;
  std::condition_variable asked, done;
  int64_t bytes = 0;  // asked for and not begun
  bool stop = false;
  void* data = nullptr;
  std::atomic<bool> arrived{false};
};

Ahead::Ahead(std::shared_ptr<MemoryResource> resource, int64_t alignment)
    : owner_process_(this_process()), shared_(new Shared(std::move(resource), alignment)) {}

Ahead::~Ahead() {
  if (this_process() != owner_process_) {
    // A fork's child: there is no thread to join. The handle and all that the lost thread held
    // locked are left alone.
    new std::thread(std::move(thread_));
    return;
  }
  if (thread_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->stop = true;
    }
    shared_->asked.notify_one();
    thread_.join();
  }
  delete shared_;
}

bool Ahead::ask(int64_t bytes) {
  if (this_process() != owner_process_) return false;
  try {
    if (!thread_.joinable()) thread_ = std::thread([shared = shared_] { serve(*shared); });
  } catch (const std::system_error&) {
    return false;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->bytes = bytes;
    shared_->arrived = false;
  }
  shared_->asked.notify_one();
  return true;
}

bool Ahead::arrived() const { return this_process() != owner_process_ || shared_->arrived; }

void* Ahead::collect() {
  if (this_process() != owner_process_) return nullptr;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->done.wait(lock, [&] { return shared_->arrived.load(); });
  return shared_->data;
}

void Ahead::serve(Shared& shared) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  for (;;) {
    shared.asked.wait(lock, [&] { return shared.stop || shared.bytes > 0; });
    if (shared.stop) return;
    const int64_t bytes = shared.bytes;
    shared.bytes = 0;
    lock.unlock();
    void* data = nullptr;
    try {
      data = shared.resource->allocate(size_t(bytes), size_t(shared.alignment));
    } catch (const std::exception&) {
      data = nullptr;  // told like any other refusal
    }
    lock.lock();
    shared.data = data;
    shared.arrived = true;
    shared.done.notify_one();
  }
}

}  // namespace pariskv
