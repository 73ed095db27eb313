# CAPSTAN_CUDA_INTERFACE: a hash of the headers through which the program and its CUDA backend exchange
# structs. The program refuses a backend whose hash differs (src/tensor/cuda_library.cpp).
file(GLOB interface_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*.hpp)
list(APPEND interface_headers
  ${PROJECT_SOURCE_DIR}/src/tensor/cuda_backend.hpp ${PROJECT_SOURCE_DIR}/src/tensor/dtype.hpp
  ${PROJECT_SOURCE_DIR}/src/tensor/kernel_context.hpp ${PROJECT_SOURCE_DIR}/src/base/philox.hpp)
set(hashes)
foreach(header IN LISTS interface_headers)
  file(SHA256 ${header} hash)
  list(APPEND hashes ${hash})
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 CAPSTAN_CUDA_INTERFACE)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${interface_headers})
