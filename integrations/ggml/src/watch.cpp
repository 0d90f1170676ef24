// Buffers of KV caches: their stores, and the writes that no node of a graph shows.
#include <unordered_map>

#include "store.h"

namespace pariskv::ggml {

namespace {

std::mutex mutex;
/** Never destroyed: a host may free its buffers after the process' static objects are gone. */
std::unordered_map<ggml_backend_buffer_t, std::shared_ptr<Store>>& stores() {
  static auto* all = new std::unordered_map<ggml_backend_buffer_t, std::shared_ptr<Store>>();
  return *all;
}

std::shared_ptr<Store> known(ggml_backend_buffer_t buffer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = stores().find(buffer);
  return found == stores().end() ? nullptr : found->second;
}

char* at(ggml_tensor* tensor, size_t offset) { return static_cast<char*>(tensor->data) + offset; }

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  const std::shared_ptr<Store> store = known(buffer);
  store->original().set_tensor(buffer, tensor, data, offset, size);
  store->wrote_bytes(at(tensor, offset), size);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
  const std::shared_ptr<Store> store = known(buffer);
  store->original().memset_tensor(buffer, tensor, value, offset, size);
  store->wrote_bytes(at(tensor, offset), size);
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* source, ggml_tensor* to) {
  const std::shared_ptr<Store> store = known(buffer);
  const bool copied = store->original().cpy_tensor(buffer, source, to);
  if (copied) store->wrote_all();
  return copied;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  const std::shared_ptr<Store> store = known(buffer);
  store->original().clear(buffer, value);
  store->wrote_all();
}

void free_buffer(ggml_backend_buffer_t buffer) {
  std::shared_ptr<Store> store;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = stores().find(buffer);
    store = std::move(found->second);
    stores().erase(found);
  }
  const std::string summary = store->summary();
  if (!summary.empty()) say(GGML_LOG_LEVEL_INFO, summary);
  // A dry run of a context has buffers without memory.
  if (store->original().free_buffer != nullptr) store->original().free_buffer(buffer);
}

}  // namespace

std::shared_ptr<Store> store_of(ggml_backend_buffer_t buffer, const Settings& settings) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Store>& store = stores()[buffer];
  if (store != nullptr) return store;
  store = std::make_shared<Store>(buffer, settings);
  ggml_backend_buffer_i& own = buffer->iface;
  if (own.set_tensor != nullptr) own.set_tensor = set_tensor;
  if (own.memset_tensor != nullptr) own.memset_tensor = memset_tensor;
  if (own.cpy_tensor != nullptr) own.cpy_tensor = cpy_tensor;
  if (own.clear != nullptr) own.clear = clear;
  own.free_buffer = free_buffer;
  return store;
}

}  // namespace pariskv::ggml
