# What an embedder gets: headers, the archive, the shared library, and a package for
# find_package(pariskv).
# Inside a wheel the same tree lies in the Python package.
if(PARISKV_GLIBC)
  return()  # a published wheel: its archive would need the newer glibc of the machine that built it
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pariskv)

install(DIRECTORY cpp/include/pariskv DESTINATION include FILES_MATCHING PATTERN "*.h")
set(libraries pariskv)
if(TARGET pariskv_shared)
  list(APPEND libraries pariskv_shared)
endif()
install(
  TARGETS ${libraries}
  EXPORT pariskvTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT pariskvTargets NAMESPACE pariskv:: DESTINATION ${package_dir})

configure_package_config_file(cmake/pariskvConfig.cmake.in pariskvConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(pariskvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/pariskvConfig.cmake
              ${PROJECT_BINARY_DIR}/pariskvConfigVersion.cmake DESTINATION ${package_dir})
