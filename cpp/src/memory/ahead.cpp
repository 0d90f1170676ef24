#include "memory/ahead.h"

#include <atomic>
#include <condition_variable>
#include <deque>
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
  struct Request {
    int64_t bytes;
    void* data = nullptr;
    bool done = false;
  };
  std::deque<Request> requests;  // not collected yet, the oldest first
  size_t begun = 0;              // of these
  struct Gone {
    void* data;
    int64_t bytes;
  };
  std::deque<Gone> gone;  // to be given back to the resource
  bool stop = false;
  std::atomic<bool> arrived{false};  // the first of them is done

  void deallocate(const Gone& piece) noexcept {
    resource->deallocate(piece.data, size_t(piece.bytes), size_t(alignment));
  }
  void look() { arrived = !requests.empty() && requests.front().done; }
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
  for (const Shared::Gone& piece : shared_->gone) shared_->deallocate(piece);
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
    shared_->requests.push_back({bytes});
    shared_->look();
  }
  shared_->asked.notify_one();
  return true;
}

bool Ahead::arrived() const { return this_process() != owner_process_ || shared_->arrived; }

void* Ahead::collect() {
  if (this_process() != owner_process_) return nullptr;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->done.wait(lock, [&] { return shared_->arrived.load(); });
  void* const data = shared_->requests.front().data;
  shared_->requests.pop_front();
  --shared_->begun;
  shared_->look();
  return data;
}

int64_t Ahead::take_back() {
  if (this_process() != owner_process_) return 0;  // what the thread had locked is left alone
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const int64_t count = int64_t(shared_->requests.size() - shared_->begun);
  shared_->requests.resize(shared_->begun);
  return count;
}

bool Ahead::give_back(void* data, int64_t bytes) {
  if (this_process() != owner_process_ || !thread_.joinable()) return false;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->gone.push_back({data, bytes});
  }
  shared_->asked.notify_one();
  return true;
}

void Ahead::serve(Shared& shared) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  for (;;) {
    shared.asked.wait(lock, [&] {
      return shared.stop || !shared.gone.empty() || shared.begun < shared.requests.size();
    });
    if (shared.stop) return;
    if (!shared.gone.empty()) {
      const Shared::Gone piece = shared.gone.front();
      shared.gone.pop_front();
      lock.unlock();
      shared.deallocate(piece);
      lock.lock();
      continue;
    }
    // It stays where it is whatever comes behind it or goes before it.
    Shared::Request& request = shared.requests[shared.begun++];
    lock.unlock();
    void* data = nullptr;
    try {
      data = shared.resource->allocate(size_t(request.bytes), size_t(shared.alignment));
    } catch (const std::exception&) {
      data = nullptr;  // told like any other refusal
    }
    lock.lock();
    request.data = data;
    request.done = true;
    shared.look();
    shared.done.notify_one();
  }
}

}  // namespace pariskv
