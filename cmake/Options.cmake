# Compiler flags, ccache and the libraries that the modules share.

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths relative to the tree: another clone, or another build directory, finds what this one has compiled.
  # SLOPPINESS: what ccache wants before it takes precompiled headers. DEPEND: included files come from the
  # compiler, not from a preprocessor that runs before it. PCH_EXTSUM: Precompiled.cmake.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
    CCACHE_PCH_EXTSUM=1 CCACHE_DEPEND=1 ${CCACHE_PROGRAM})
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
option(CAPSTAN_LINE_TABLES "line tables; without them reports name functions only, \
and a sanitizer build takes a sixth less time" ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O2")
set(CMAKE_CXX_FLAGS_DEBUG "-O1")
if(CAPSTAN_LINE_TABLES)
  string(APPEND CMAKE_CXX_FLAGS_RELEASE " -g1")
  string(APPEND CMAKE_CXX_FLAGS_DEBUG " -g1")
endif()

# FMA contraction is left to explicit code: the same source gives the same bits at every optimization level.
add_compile_options(-Wall -Wextra -Wshadow -Wno-missing-field-initializers
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> -ffp-contract=off -fno-math-errno)
add_link_options(-Wl,--as-needed)  # a library loaded for nothing delays every command
find_program(MOLD_PROGRAM mold)
if(MOLD_PROGRAM AND NOT "${CMAKE_EXE_LINKER_FLAGS}" MATCHES "-fuse-ld")
  add_link_options(-fuse-ld=mold)  # the tests are a hundred programs
endif()
if(CAPSTAN_WERROR)
  add_compile_options(-Werror)
endif()
if(CAPSTAN_SANITIZE)
  # At -O1 clang inlines nothing that is not marked: tests of data take a fifth less time with it.
  set(CAPSTAN_SANITIZE_OPTIONS -fsanitize=${CAPSTAN_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -finline-functions)
  if(CAPSTAN_SANITIZE MATCHES "undefined")
    # Null pointers end the program anyway, and the address sanitizer knows sizes:
    # a fifth of the time to compile.
    list(APPEND CAPSTAN_SANITIZE_OPTIONS -fno-sanitize=null,vptr,object-size)
  endif()
  add_compile_options(${CAPSTAN_SANITIZE_OPTIONS})
  add_link_options(-fsanitize=${CAPSTAN_SANITIZE})
endif()
if(CAPSTAN_FUZZ)
  # For the modules that fuzz targets use (FUZZED): counting branches takes a third of the time to compile.
  # Without tracing every comparison, which took up to half of the time of a target; the words of the formats
  # are in corpora and dictionaries.
  set(CAPSTAN_FUZZ_OPTIONS -fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp)
  # clang's default version confuses some binutils. -gdwarf-4 would also ask for full debug information, with
  # or without line tables: programs of 15 GB.
  add_compile_options(-fdebug-default-version=4)
endif()

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(Boost REQUIRED COMPONENTS context program_options)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(simdjson REQUIRED)
find_package(doctest REQUIRED)
set(MPI_CXX_SKIP_MPICXX TRUE)  # the C interface is all that is used
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(ZLIB REQUIRED)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(ONIGURUMA REQUIRED IMPORTED_TARGET oniguruma)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)

# Debian's package configuration of oneDNN asks for OpenCL, which the CPU engine does not use.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
add_library(capstan_dnnl INTERFACE)
target_link_libraries(capstan_dnnl INTERFACE ${DNNL_LIBRARY})
target_include_directories(capstan_dnnl INTERFACE ${DNNL_INCLUDE_DIR})
