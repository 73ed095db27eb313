# capstan_cudnn: cuDNN 9 and the headers of cudnn-frontend, for attention of the CUDA backend (CAPSTAN_CUDNN).
if(NOT CAPSTAN_CUDA)
  message(FATAL_ERROR "CAPSTAN_CUDNN is an option of the CUDA backend: set CAPSTAN_CUDA, too")
endif()
set(CAPSTAN_CUDNN_FRONTEND "" CACHE PATH "folder of cudnn_frontend.h, or one above its `include`")
find_path(CAPSTAN_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
  HINTS ${CAPSTAN_CUDNN_FRONTEND} ${CAPSTAN_CUDNN_FRONTEND}/include ${CUDAToolkit_INCLUDE_DIRS})
if(NOT CAPSTAN_CUDNN_FRONTEND_INCLUDE)
  message(FATAL_ERROR "CAPSTAN_CUDNN: cudnn_frontend.h was not found. \
It is in https://github.com/NVIDIA/cudnn-frontend (`include`; compiled with 1.32), and in the package \
nvidia-cudnn-frontend of PyPI, which scripts/install.sh cuda puts into build/cudnn-frontend: set \
CAPSTAN_CUDNN_FRONTEND to its folder")
endif()
find_path(CAPSTAN_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(CAPSTAN_CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
set(CUDNN_VERSION_TEXT "")
if(CAPSTAN_CUDNN_INCLUDE AND EXISTS ${CAPSTAN_CUDNN_INCLUDE}/cudnn_version.h)
  file(STRINGS ${CAPSTAN_CUDNN_INCLUDE}/cudnn_version.h CUDNN_VERSION_TEXT REGEX "define CUDNN_MAJOR +9")
endif()
if(NOT CAPSTAN_CUDNN_LIBRARY OR NOT CUDNN_VERSION_TEXT)
  message(FATAL_ERROR "CAPSTAN_CUDNN: cuDNN 9 was not found (cudnn.h, libcudnn.so). \
NVIDIA's repository has it: `apt install cudnn9-cuda-${CUDAToolkit_VERSION_MAJOR}`. \
Elsewhere: set CAPSTAN_CUDNN_INCLUDE and CAPSTAN_CUDNN_LIBRARY")
endif()
add_library(capstan_cudnn INTERFACE)
target_include_directories(capstan_cudnn SYSTEM INTERFACE
  ${CAPSTAN_CUDNN_FRONTEND_INCLUDE} ${CAPSTAN_CUDNN_INCLUDE} ${CUDAToolkit_INCLUDE_DIRS})
# The frontend calls NVRTC, with which cuDNN compiles most of its kernels of attention.
target_link_libraries(capstan_cudnn INTERFACE ${CAPSTAN_CUDNN_LIBRARY} CUDA::nvrtc)
message(STATUS "attention of the CUDA backend: cuDNN too, where kernels/cuda/attention_choice.hpp says so")
