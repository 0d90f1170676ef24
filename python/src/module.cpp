#include "module.h"

#include "pariskv/pariskv.h"

NB_MODULE(_core, m) {
  namespace nb = nanobind;
  m.doc() = "The pariskv engine. Import pariskv_core instead.";
  nb::exception<pariskv::OutOfMemory>(m, "OutOfMemory", PyExc_MemoryError);
  pariskv::python::bind_info(m);
  pariskv::python::bind_config(m);
  pariskv::python::bind_stats(m);
  pariskv::python::bind_cache(m);
}
