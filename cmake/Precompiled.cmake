# The standard headers that most files include, compiled once for all targets with the same options: a quarter
# of the time to compile a file. Sources still include what they use: clang-tidy, which does without,
# finds what is missing.
option(CAPSTAN_PRECOMPILE "precompile the standard headers" ON)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # Without the time in the precompiled file, and with a checksum of its headers in place of its content,
  # which has the path of the build directory, ccache finds what another build directory has compiled.
  set(CAPSTAN_PRECOMPILE_OPTIONS "SHELL:-Xclang -fno-pch-timestamp")
  # CMake's own value names the header besides, by an absolute path that ccache does not make relative.
  set(CMAKE_CXX_COMPILE_OPTIONS_USE_PCH -Xclang -include-pch -Xclang <PCH_FILE>)
endif()

set(CAPSTAN_PRECOMPILED_HEADERS
    <algorithm> <array> <chrono> <cmath> <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional>
    <set> <span> <sstream> <string> <string_view> <thread> <unordered_map> <utility> <variant> <vector>)

if(CAPSTAN_PRECOMPILE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  list(TRANSFORM CAPSTAN_PRECOMPILED_HEADERS REPLACE "(.+)" "#include \\1" OUTPUT_VARIABLE includes)
  list(JOIN includes "\n" includes)
  file(CONFIGURE OUTPUT precompiled_headers.cpp CONTENT "${includes}\n" @ONLY)
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 -pthread -E -P
            ${CMAKE_CURRENT_BINARY_DIR}/precompiled_headers.cpp
    OUTPUT_VARIABLE preprocessed COMMAND_ERROR_IS_FATAL ANY)
  string(SHA256 CAPSTAN_PRECOMPILED_SUM "${preprocessed}")
endif()

# capstan_precompile(TARGET KIND): the targets of one KIND have the same compile options.
function(capstan_precompile target kind)
  if(NOT CAPSTAN_PRECOMPILE)
    return()
  endif()
  # GCC 12 warns of std::string's own code, which it does not recognize as a system header's when it is
  # precompiled.
  target_compile_options(${target} PRIVATE
    "$<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow;-Wno-array-bounds>")
  set(precompiled capstan_precompiled_${kind})
  if(NOT TARGET ${precompiled})
    file(CONFIGURE OUTPUT precompiled.cpp
      CONTENT "// Nothing: the headers of ${precompiled} are its content.\n")
    add_library(${precompiled} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cpp)
    get_target_property(options ${target} COMPILE_OPTIONS)
    set_target_properties(${precompiled} PROPERTIES COMPILE_OPTIONS "${options}")
    target_compile_options(${precompiled} PRIVATE ${CAPSTAN_PRECOMPILE_OPTIONS})
    target_precompile_headers(${precompiled} PRIVATE ${CAPSTAN_PRECOMPILED_HEADERS})
    if(CAPSTAN_PRECOMPILED_SUM)
      file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${precompiled}.dir/cmake_pch.hxx.pch.sum
        ${CAPSTAN_PRECOMPILED_SUM})
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${precompiled})
endfunction()
