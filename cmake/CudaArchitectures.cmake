# CAPSTAN_CUDA_ARCHITECTURES: the GPUs for which the kernels of the CUDA backend are compiled. Sets
# CMAKE_CUDA_ARCHITECTURES, before CUDA is enabled.
set(CAPSTAN_CUDA_ARCHITECTURES "auto" CACHE STRING "`auto`: the GPUs of this machine, or `all` where it has \
none; `all`: those that the kernels are written for; or a list for CMAKE_CUDA_ARCHITECTURES")

# The architectures in a list of numbers (80, 90) that this nvcc compiles for, as 80 and 90a, each once. Code
# of 90a and newer is for one GPU, and has all its instructions.
function(capstan_offered_architectures result)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code
    OUTPUT_VARIABLE offered COMMAND_ERROR_IS_FATAL ANY)
  set(found)
  foreach(number IN LISTS ARGN)
    if(number LESS 80 OR NOT offered MATCHES "sm_${number}[^0-9]")
      continue()
    elseif(number GREATER_EQUAL 90)
      string(APPEND number a)
    endif()
    list(APPEND found ${number})
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# The GPUs of this machine that nvcc compiles for; empty where there is none.
function(capstan_architectures_here result)
  find_program(NVIDIA_SMI nvidia-smi)
  set(found)
  if(NVIDIA_SMI)
    execute_process(COMMAND ${NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE output ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${output}")
    string(REPLACE "." "" numbers "${capabilities}")
    capstan_offered_architectures(found ${numbers})
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

set(CMAKE_CUDA_ARCHITECTURES ${CAPSTAN_CUDA_ARCHITECTURES})
if(CAPSTAN_CUDA_ARCHITECTURES MATCHES "^(auto|all)$")
  set(architectures)
  if(CAPSTAN_CUDA_ARCHITECTURES STREQUAL "auto")
    capstan_architectures_here(architectures)
  endif()
  # PTX is for GPUs that are not in the list.
  set(CMAKE_CUDA_ARCHITECTURES 80-virtual)
  if(NOT architectures)
    capstan_offered_architectures(architectures 80 89 90 100 103 120)
    list(GET architectures -1 newest)
    string(REPLACE a "" newest ${newest})
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual)
  endif()
  foreach(architecture IN LISTS architectures)
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
  endforeach()
endif()
