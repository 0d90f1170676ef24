/** The cache behind a Python object, and calls into it. */
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "arguments.h"
#include "arrays.h"
#include "unlocked.h"

namespace pariskv::python {

/** A cache that can be closed, also while another thread is inside a call. */
class Handle {
 public:
  explicit Handle(const Config& config) : cache_(std::make_shared<Cache>(config, resources())) {}

  std::shared_ptr<Cache> open() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!cache_) throw nb::value_error("this cache is closed; make a new one");
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
  static Resources resources() {
    Resources own;
    own.should_stop = &Unlocked::signal_raised;
    return own;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<Cache> cache_;
};

/** Calls into the engine without the GIL. Raises what a signal's handler raised meanwhile. */
template <typename Call>
auto unlocked(std::shared_ptr<Cache> cache, Call call) {
  std::exception_ptr raised;
  {
    const Unlocked release;
    const std::shared_ptr<Cache> held = std::move(cache);  // let go without the GIL, too
    try {
      return call(*held);
    } catch (...) {
      raised = release.raised();
      if (!raised) throw;
    }
  }
  std::rethrow_exception(raised);
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

/** The type of an argument that takes sequences. */
#define PKV_SIGNATURE_BATCH "collections.abc.Sequence[int] | Batch"

/** A method of Cache whose arguments have names, by which an error calls them. */
template <typename Call>
void define(nb::class_<Handle>& cache, Parameters parameters, Call call, const char* signature,
            const char* doc) {
  const char* name = parameters.verb;
  cache.def(
      name,
      [parameters = std::move(parameters), call](Handle& self, const nb::args& positional,
                                                 const nb::kwargs& keywords) {
        return call(self, Arguments(parameters, positional, keywords));
      },
      nb::sig(signature), doc);
}

/** The methods that move arrays in and out, and those that write and read files. */
void bind_calls(nb::class_<Handle>& cache);
void bind_files(nb::class_<Handle>& cache);
/** Rows as pages, which have classes of their own. */
void bind_pages(nb::module_& m, nb::class_<Handle>& cache);

}  // namespace pariskv::python
