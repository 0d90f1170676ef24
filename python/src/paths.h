/** Paths that come in, and what the system says about files. */
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace pariskv::python {

/** The system's bytes of a str, bytes or os.PathLike; raises TypeError for anything else. */
std::string path_of(const char* verb, nanobind::handle path);

/** FileError becomes OSError, and by its errno FileNotFoundError and the like. */
void translate_file_errors();

}  // namespace pariskv::python
