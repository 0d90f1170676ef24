#include "module.h"

#include "pariskv/pariskv.h"
#include "paths.h"
#include "unlocked.h"

NB_MODULE(_core, m) {
  namespace nb = nanobind;
  // A daemon thread may hold objects when the interpreter ends; that is no news to print.
  nb::set_leak_warnings(false);
  m.doc() = "The pariskv engine. Import pariskv_core instead.";
  nb::exception<pariskv::OutOfMemory>(m, "OutOfMemory", PyExc_MemoryError);
  pariskv::python::translate_file_errors();
  pariskv::python::bind_info(m);
  pariskv::python::bind_policies(m);
  pariskv::python::bind_config(m);
  pariskv::python::bind_stats(m);
  pariskv::python::bind_cache(m);
  const nb::object main = nb::module_::import_("threading").attr("main_thread")();
  pariskv::python::note_main_thread(nb::cast<unsigned long>(main.attr("ident")));
  nb::module_::import_("os").attr("register_at_fork")(
      nb::arg("after_in_child") =
          nb::cpp_function([] { pariskv::python::note_main_thread(PyThread_get_thread_ident()); }));
  nb::module_::import_("atexit").attr("register")(
      nb::cpp_function(&pariskv::python::close_the_door));
}
