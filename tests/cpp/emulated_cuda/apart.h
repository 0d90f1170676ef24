/** Steps of a decode that are launched one by one, as the bench does. */
#pragma once

namespace emulator {

extern bool steps_apart;

}  // namespace emulator
