/**
 * The driver's functions that map memory: the runtime has none for this, and a program need not
 * link the driver.
 */
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace pariskv::cuda {

struct Driver {
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) unreserve;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  bool complete;  // all of them are there
};

const Driver& driver();

}  // namespace pariskv::cuda
