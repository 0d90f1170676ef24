/** The cache behind a Python object, and calls into it. */
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "arrays.h"
#include "unlocked.h"

namespace pariskv::python {

/** A cache that can be closed, also while another thread is inside a call. */
class Handle {
 public:
  explicit Handle(const Config& config) : cache_(std::make_shared<Cache>(config)) {}

  std::shared_ptr<Cache> open() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!cache_) throw nb::value_error("this cache is closed");
    return cache_;
  }
  void close() {
    std::shared_ptr<Cache> last;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last.swap(cache_);
    }
    const Unlocked release;  // zeroing a large cache takes a while
    last.reset();
  }
  ~Handle() { close(); }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Cache> cache_;
};

/** Calls into the engine without the GIL. */
template <typename Call>
auto unlocked(std::shared_ptr<Cache> cache, Call call) {
  const Unlocked release;
  const std::shared_ptr<Cache> held = std::move(cache);  // let go without the GIL, too
  return call(*held);
}

template <typename Call>
auto unlocked(const Handle& handle, Call call) {
  return unlocked(handle.open(), std::move(call));
}

/** A stream's handle, or None for the current one. */
using StreamHandle = std::optional<uintptr_t>;

/** The stream that a call joins; asked of PyTorch, if that is there, when none was named. */
inline Stream stream_of(const StreamHandle& stream, const Config& config) {
  const bool cuda = config.device.type == DeviceType::kCuda;
  const uintptr_t handle = stream ? *stream : cuda ? current_stream(config.device.index) : 0;
  return {reinterpret_cast<void*>(handle)};
}

inline Stream stream_of(const StreamHandle& stream, const Handle& handle) {
  return stream_of(stream, handle.open()->config());
}

/** The methods that write and read files. */
void bind_files(nb::class_<Handle>& cache);

}  // namespace pariskv::python
