# Which GPUs the CUDA backend is compiled for. It takes a minute or two for each kind, and pip is
# silent meanwhile: so for those of this machine alone, where there are any.
set(PARISKV_CUDA_ARCHITECTURES "" CACHE STRING
    "What to compile for: empty for the GPUs of this machine; all-supported, 90, native, ...")

# The compute capabilities that nvidia-smi lists, 90 for 9.0; empty where there is no GPU.
function(pariskv_find_gpus result)
  set(found)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE lines RESULT_VARIABLE failed ERROR_QUIET TIMEOUT 60)
  if(failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${lines}")
    string(REPLACE "." "" found "${found}")
    list(REMOVE_DUPLICATES found)
    list(SORT found COMPARE NATURAL)
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# The value of PARISKV_CUDA_ARCHITECTURES as CMake takes it. `known`: what nvcc has machine code for.
function(pariskv_choose_architectures value known result)
  set(why)
  if("${value}" STREQUAL "")
    set(why ", since no GPU was found here (nvidia-smi)")
    set(names)
    pariskv_find_gpus(gpus)
    foreach(gpu IN LISTS gpus)
      string(REGEX REPLACE "(.)$" ".\\1" name ${gpu})
      if(gpu LESS 80)
        set(why ", since the GPU of this machine, ${name}, is too old for it")
      elseif(known MATCHES "sm_${gpu}[^0-9a-z]")
        list(APPEND value ${gpu}-real)
        list(APPEND names ${name})
      else()
        set(value)  # PTX of the newest runs there
        set(why ", since nvcc does not know the GPU of this machine, ${name}")
        break()
      endif()
    endforeach()
    if(value)
      list(JOIN names " and " names)
      message(STATUS "pariskv: compiling the CUDA backend for the GPU of this machine alone, "
                     "compute capability ${names}; PARISKV_CUDA_ARCHITECTURES=all-supported "
                     "compiles for every GPU since 8.0")
    else()
      set(value all-supported)
    endif()
  endif()

  if("${value}" STREQUAL "all-supported")
    set(value)
    foreach(architecture 80 86 89 90 100 120)
      if(known MATCHES "sm_${architecture}[^0-9a-z]")
        list(APPEND value ${architecture}-real)
        set(last ${architecture})
      else()
        message(STATUS "pariskv: ${CMAKE_CUDA_COMPILER} does not know sm_${architecture}, so there "
                       "is no code for such GPUs in this build; nvcc 12.8 or newer knows them all")
      endif()
    endforeach()
    list(APPEND value ${last}-virtual)  # PTX, for what comes after it
    message(STATUS "pariskv: compiling the CUDA backend for every GPU since 8.0${why}. That takes "
                   "about ten minutes on two cores; PARISKV_CUDA_ARCHITECTURES=90 compiles for "
                   "compute capability 9.0 alone, and PARISKV_CUDA=OFF leaves CUDA out")
  endif()
  set(${result} ${value} PARENT_SCOPE)
endfunction()
