# libpariskv.so: the objects of the archive once more, with the names of the API alone.
option(PARISKV_SHARED "Build the shared library too" ${PARISKV_SHARED_DEFAULT})
if(NOT PARISKV_SHARED)
  return()
endif()

set(api_names ${PROJECT_SOURCE_DIR}/cmake/exported.map)
add_library(pariskv_shared SHARED $<TARGET_OBJECTS:pariskv>)
add_library(pariskv::shared ALIAS pariskv_shared)
target_include_directories(
  pariskv_shared PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp/include>
                        $<INSTALL_INTERFACE:include>)
target_compile_features(pariskv_shared PUBLIC cxx_std_17)
target_link_libraries(pariskv_shared PRIVATE Threads::Threads)
if(TARGET pariskv_hopper)
  target_sources(pariskv_shared PRIVATE $<TARGET_OBJECTS:pariskv_hopper>)
endif()
if(PARISKV_HAVE_CUDA)
  target_link_libraries(pariskv_shared PRIVATE CUDA::cudart_static)
endif()
# Templates of the standard library that the code uses are visible to all, whatever the flags.
target_link_options(pariskv_shared PRIVATE -Wl,--version-script=${api_names})
set_target_properties(
  pariskv_shared
  PROPERTIES OUTPUT_NAME pariskv EXPORT_NAME shared LINKER_LANGUAGE CXX LINK_DEPENDS ${api_names})
if(NOT SKBUILD) # a wheel has no links: each name would be the whole library once more
  # Before 1.0 a new minor version may change the interface.
  set_target_properties(
    pariskv_shared PROPERTIES VERSION ${PROJECT_VERSION}
                              SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()
