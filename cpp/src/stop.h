/** Long calls ask the program that made them whether to go on. */
#pragma once

#include <functional>
#include <utility>

#include "pariskv/error.h"

namespace pariskv {

inline Stopped stopped() {
  return Stopped("the call was told to stop; the cache is as it was before it");
}

/** Resources::should_stop, which may be empty. To be asked on the thread of the call alone. */
class StopCheck {
 public:
  explicit StopCheck(std::function<bool()> asked = {}) : asked_(std::move(asked)) {}

  bool possible() const { return bool(asked_); }
  bool wanted() const { return asked_ && asked_(); }
  void check() const {
    if (wanted()) throw stopped();
  }

 private:
  std::function<bool()> asked_;
};

}  // namespace pariskv
