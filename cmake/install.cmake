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

# pariskv.pc, for builds without CMake. It finds its folder by its own place, so that a tarball may
# be unpacked anywhere.
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  message(STATUS "pariskv: CMAKE_INSTALL_LIBDIR is an absolute path, so there is no pariskv.pc")
  return()
endif()
file(RELATIVE_PATH up /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
string(REGEX REPLACE "/$" "" up ${up})
set(pc_prefix "\${pcfiledir}/${up}")
set(pc_private " -lstdc++ -lm -lpthread")
if(PARISKV_HAVE_CUDA)
  string(APPEND pc_private " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
set(pc_libs)
if(NOT TARGET pariskv_shared)
  set(pc_libs ${pc_private})
  set(pc_private)
endif()
configure_file(cmake/pariskv.pc.in pariskv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pariskv.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
