/** Where exceptions end: a status for the caller, a sentence for its thread. */
#pragma once

#include "pariskv/c.h"

namespace pariskv::c {

/** Notes the exception that is being handled, and says which status it is. */
pariskv_status failed() noexcept;

template <typename Work>
pariskv_status answer(const Work& work) noexcept {
  try {
    work();
    return PARISKV_OK;
  } catch (...) {
    return failed();
  }
}

}  // namespace pariskv::c
