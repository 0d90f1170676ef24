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

# Its type stub. The generator imports the extension, from a package without the modules that need
# NumPy; a machine that cross-compiles cannot.
if(CMAKE_CROSSCOMPILING)
  message(STATUS "pariskv: cross-compiling, so this build has no type stub of the extension")
else()
  set(package ${CMAKE_CURRENT_BINARY_DIR}/python/pariskv_core)
  file(WRITE ${package}/__init__.py "")
  configure_file(python/pariskv_core/_array.py ${package}/_array.py COPYONLY)
  set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package})
  nanobind_add_stub(
    _core_stub
    MODULE pariskv_core._core
    OUTPUT ${package}/_core.pyi
    PYTHON_PATH ${CMAKE_CURRENT_BINARY_DIR}/python
    PATTERN_FILE ${PROJECT_SOURCE_DIR}/python/stub_patterns.txt
    DEPENDS _core)
  install(FILES ${package}/_core.pyi DESTINATION .)
endif()

# The plugin for hosts of ggml, where the folder of ggml's sources is named.
set(GGML "" CACHE PATH "With the plugin for llama: ggml's sources (docs/llama-cpp.md)")
set(binaries _core)
if(GGML)
  add_subdirectory(integrations/ggml)
  install(TARGETS ggml-pariskv LIBRARY DESTINATION ggml)
  list(APPEND binaries ggml-pariskv)
endif()

# The wheels that are published also bring the C++ library: the other machine's may be older.
if(PARISKV_GLIBC)
  foreach(binary ${binaries})
    target_sources(${binary} PRIVATE ${PROJECT_SOURCE_DIR}/packaging/older_glibc.cpp)
    target_link_directories(${binary} BEFORE PRIVATE ${PARISKV_GLIBC})
    # The CUDA runtime comes after these libraries, and asks for some of their names.
    target_link_options(${binary} PRIVATE -static-libstdc++ -Wl,--exclude-libs,ALL,--no-as-needed)
    target_link_libraries(${binary} PRIVATE pthread dl rt m)
  endforeach()
endif()
