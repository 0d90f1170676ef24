# The Python extension. From Python 3.12 on one binary serves every later version; older and
# free-threaded interpreters get one of their own (nanobind decides).
find_package(
  Python 3.10 REQUIRED
  COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)
find_package(nanobind CONFIG REQUIRED)

file(GLOB bindings CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/src/*.cpp)
nanobind_add_module(_core NB_STATIC STABLE_ABI FREE_THREADED NB_SUPPRESS_WARNINGS ${bindings})
target_link_libraries(_core PRIVATE pariskv)
target_compile_options(
  _core PRIVATE -Wall -Wextra -Wshadow $<$<BOOL:${PARISKV_WERROR}>:-Werror>
                -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
install(TARGETS _core LIBRARY DESTINATION .)
