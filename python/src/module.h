/** The parts that make up the extension module, one per file. */
#pragma once

#include <nanobind/nanobind.h>

namespace pariskv::python {

void bind_policies(nanobind::module_& m);
void bind_config(nanobind::module_& m);
void bind_stats(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_info(nanobind::module_& m);

}  // namespace pariskv::python
