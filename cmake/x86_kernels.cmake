# One file per instruction set, compiled with that set's flags; everything else is compiled
# for the oldest machine, and cpp/src/cpu/simd/dispatch.cpp chooses at run time.
include(CheckCXXCompilerFlag)

set(avx2_flags -mavx2 -mfma -mf16c -mbmi2)
set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi
                 -mavx512vbmi2 -mavx512vnni)

set(has_x86_flags FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  string(JOIN " " flags ${avx512_flags})
  check_cxx_compiler_flag("${flags}" PARISKV_HAS_X86_FLAGS)
  set(has_x86_flags ${PARISKV_HAS_X86_FLAGS})
endif()

set(x86_definitions "")
foreach(level avx2 avx512)
  set(file ${PROJECT_SOURCE_DIR}/cpp/src/cpu/simd/${level}.cpp)
  if(has_x86_flags)
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${${level}_flags}")
    set(x86_definitions PKV_HAVE_X86_KERNELS)
  else()
    list(REMOVE_ITEM sources ${file})
  endif()
endforeach()
if(NOT has_x86_flags)
  message(STATUS "pariskv: no AVX2 and AVX-512 kernels for this compiler or processor; plain only")
endif()
