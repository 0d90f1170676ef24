# The CUDA backend, in the same library, wherever there is a compiler for it. Every .cu and .cpp
# file under cpp/cuda belongs to it, so adding one takes no edit here; no_cuda.cpp alone stands
# in for all of them in a build without.
include(CheckLanguage)
include(${CMAKE_CURRENT_LIST_DIR}/cuda_architectures.cmake)

set(PARISKV_CUDA AUTO CACHE STRING "The CUDA backend: ON, OFF, or AUTO for where nvcc is found")
set_property(CACHE PARISKV_CUDA PROPERTY STRINGS AUTO ON OFF)
option(PARISKV_POOLING "Off: every block of GPU memory on its own, for compute-sanitizer" ON)

set(cuda_dir ${PROJECT_SOURCE_DIR}/cpp/cuda)
set(PARISKV_HAVE_CUDA FALSE)
if(PARISKV_CUDA)
  # CMake itself looks on the PATH only; the toolkit's own installer does not put nvcc there.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(PARISKV_NVCC nvcc PATHS ENV CUDA_PATH /usr/local/cuda /opt/cuda PATH_SUFFIXES bin)
    mark_as_advanced(PARISKV_NVCC)
    if(PARISKV_NVCC)
      set(ENV{CUDACXX} ${PARISKV_NVCC})
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # not found the last time, perhaps installed since
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(PARISKV_HAVE_CUDA TRUE)
  else()
    set(reason "no CUDA compiler was found")
    if(DEFINED ENV{CUDACXX})
      set(reason "$ENV{CUDACXX} cannot compile CUDA with this C++ compiler")
    endif()
    string(CONCAT reason "pariskv: ${reason}, so this build has no CUDA backend; "
                  "install the CUDA toolkit (nvcc 12.8 or newer) and build again")
    if(PARISKV_CUDA STREQUAL "AUTO")
      message(STATUS "${reason}")
    else()
      message(FATAL_ERROR "${reason}, or configure with PARISKV_CUDA=OFF")
    endif()
  endif()
endif()

if(NOT PARISKV_HAVE_CUDA)
  target_sources(pariskv PRIVATE ${cuda_dir}/no_cuda.cpp)
  return()
endif()

enable_language(CUDA)
# Static, so that the library loads where there is neither GPU nor driver; and named below, so
# that whoever links the archive gets it too instead of what nvcc would add.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)  # for whoever builds us with add_subdirectory
find_package(CUDAToolkit REQUIRED)
unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)

file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${cuda_dir}/*.cu ${cuda_dir}/*.cpp)
set(hopper_source ${cuda_dir}/exact/attend_exact_hopper.cu)
list(REMOVE_ITEM cuda_sources ${cuda_dir}/no_cuda.cpp ${hopper_source})
target_sources(pariskv PRIVATE ${cuda_sources})
target_include_directories(pariskv PRIVATE ${cuda_dir})
if(NOT PARISKV_POOLING)
  set_source_files_properties(${cuda_dir}/memory.cpp PROPERTIES COMPILE_DEFINITIONS
                                                                PARISKV_NO_POOLING)
endif()
target_link_libraries(pariskv PRIVATE CUDA::cudart_static)

execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known)
pariskv_choose_architectures("${PARISKV_CUDA_ARCHITECTURES}" "${known}" architectures)
# A plain number is machine code and PTX; "native" is the code of the GPUs here and nothing else.
if("${architectures}" MATCHES "(^|;)([0-9]+(-virtual)?|all|all-major)(;|$)")
  set_source_files_properties(${cuda_dir}/architectures.cu PROPERTIES COMPILE_DEFINITIONS
                                                                      PARISKV_PTX)
endif()
list(JOIN compile_options "," host_flags)
set(cuda_flags
    # As on the host: no fused multiply-add but the written ones. Formulas of both sides
    # (cpp/src/host_device.h) have the same bits because of that.
    --fmad=false --expt-relaxed-constexpr -Xcompiler=${host_flags}
    # Two architectures at a time. The build tool runs files side by side already, and each
    # process takes up to a gigabyte.
    --threads=2)
# A quarter of the bytes of each kernel, for a wheel; profilers want lines instead.
list(APPEND cuda_flags $<IF:$<BOOL:${PARISKV_GLIBC}>,--compress-mode=size,-lineinfo>)
if(PARISKV_WERROR)
  list(APPEND cuda_flags --Werror=all-warnings)
endif()
target_compile_options(pariskv PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_flags}>")
if(CMAKE_CUDA_COMPILER_LAUNCHER) # the target is older than the language
  set_target_properties(pariskv PROPERTIES CUDA_COMPILER_LAUNCHER "${CMAKE_CUDA_COMPILER_LAUNCHER}")
endif()
set_target_properties(
  pariskv PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_STANDARD 17
                     CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden
                     CUDA_RUNTIME_LIBRARY None)

# Instructions that 9.0 alone has: a part of the library that is compiled for 9.0a and nothing else.
if("${architectures}" MATCHES "(^|;)(90a?(-real|-virtual)?|native|all|all-major)(;|$)")
  add_library(pariskv_hopper OBJECT ${hopper_source})
  target_include_directories(pariskv_hopper PRIVATE $<TARGET_PROPERTY:pariskv,INCLUDE_DIRECTORIES>)
  target_compile_options(pariskv_hopper PRIVATE "${cuda_flags}")
  set_target_properties(
    pariskv_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real CUDA_STANDARD 17
                              CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
                              CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY None
                              POSITION_INDEPENDENT_CODE ON)
  target_sources(pariskv PRIVATE $<TARGET_OBJECTS:pariskv_hopper>)
  set_source_files_properties(${cuda_dir}/exact/attend_exact.cu PROPERTIES COMPILE_DEFINITIONS
                                                                     PARISKV_HOPPER)
endif()
