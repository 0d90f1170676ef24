// Memory and threads of a program in C, as the classes of C++ that they stand for.
#include "c/settings.h"
#include "c/structs.h"
#include "pariskv/executor.h"

namespace pariskv::c {

namespace {

class Memory : public MemoryResource {
 public:
  explicit Memory(const pariskv_memory& memory) : memory_(memory) {}

  void* allocate(std::size_t bytes, std::size_t alignment) override {
    void* data = memory_.allocate(memory_.user, bytes, alignment);
    const uintptr_t beyond = reinterpret_cast<uintptr_t>(data) % alignment;
    if (beyond == 0) return data;
    memory_.deallocate(memory_.user, data, bytes, alignment);
    fail("[memory] allocate: expected an address that is a multiple of ", alignment,
         ", got one that is ", beyond, " bytes beyond");
  }

  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override {
    memory_.deallocate(memory_.user, data, bytes, alignment);
  }

 private:
  const pariskv_memory memory_;
};

class Threads : public Executor {
 public:
  explicit Threads(const pariskv_executor& executor) : executor_(executor) {}

  void run(int64_t times, const Task& task) override {
    executor_.run(executor_.user, times, task.call, task.context);
  }

 private:
  const pariskv_executor executor_;
};

std::shared_ptr<MemoryResource> memory_of(const std::string& where, const pariskv_memory* given) {
  if (given == nullptr) return nullptr;
  const pariskv_memory memory = taken(where, given);
  if (memory.allocate == nullptr || memory.deallocate == nullptr) {
    fail(where, memory.allocate == nullptr ? ".allocate" : ".deallocate",
         ": expected a function, got a null pointer");
  }
  return std::make_shared<Memory>(memory);
}

std::shared_ptr<Executor> executor_of(const pariskv_executor* given) {
  if (given == nullptr) return nullptr;
  const pariskv_executor executor = taken("[resources] executor", given);
  if (executor.run == nullptr) {
    fail("[resources] executor.run: expected a function, got a null pointer");
  }
  return std::make_shared<Threads>(executor);
}

}  // namespace

Resources resources_of(const pariskv_resources* given) {
  Resources resources;
  if (given == nullptr) return resources;
  const pariskv_resources lent = taken("[resources]", given);
  resources.host = memory_of("[resources] host", lent.host);
  resources.device = memory_of("[resources] device", lent.device);
  resources.pinned = memory_of("[resources] pinned", lent.pinned);
  resources.executor = executor_of(lent.executor);
  if (lent.should_stop != nullptr) {
    resources.should_stop = [ask = lent.should_stop, user = lent.stop_user] {
      return ask(user) != 0;
    };
  }
  return resources;
}

}  // namespace pariskv::c
