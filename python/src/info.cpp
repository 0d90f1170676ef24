// What this build and machine are.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "module.h"

namespace pariskv::python {

namespace {

DeviceType device_type(const std::string& name) {
  if (name == "cpu") return DeviceType::kCpu;
  if (name == "cuda") return DeviceType::kCuda;
  throw nb::value_error(("expected a backend, \"cpu\" or \"cuda\", got \"" + name + "\"").c_str());
}

template <int64_t... kSizes>
nb::tuple tuple_of(Sizes<kSizes...>) {
  return nb::make_tuple(kSizes...);
}

}  // namespace

void bind_info(nb::module_& m) {
  m.attr("__version__") = PARISKV_VERSION_STRING;
  m.attr("HEAD_DIMS") = tuple_of(HeadDims{});
  m.def("cpu_level", &cpu_level,
        "The instruction set that the CPU backend runs on: \"plain\", \"avx2\" or \"avx512\".");
  m.def(
      "is_built", [](const std::string& backend) { return is_built(device_type(backend)); },
      nb::arg("backend"), "Whether this build has the backend, \"cpu\" or \"cuda\".");
  m.def(
      "is_available", [](const std::string& backend) { return is_available(device_type(backend)); },
      nb::arg("backend"), "Whether it does and such a device is there.");
  m.def("rotation_signs", &rotation_signs, nb::arg("rotated_dim"), nb::arg("seed"),
        "The signs, +1 or -1, of the rotation that keys are summarised in.");
  m.def(
      "magnitude_levels",
      [] {
        const MagnitudeLevels& levels = magnitude_levels();
        return std::make_pair(
            std::vector<double>(levels.thresholds.begin(), levels.thresholds.end()),
            std::vector<double>(levels.centres.begin(), levels.centres.end()));
      },
      "The 7 thresholds and 8 centres of the magnitude codes.");
}

}  // namespace pariskv::python
