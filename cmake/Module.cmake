# capstan_unity(TARGET): its sources are compiled eight at a time, which takes two fifths from the time of a
# full build. Not CMake's UNITY_BUILD, whose files include absolute paths: ccache would find nothing that
# another clone has compiled. Compiled alone are generated sources, those with options of their own and those
# with SKIP_UNITY_BUILD_INCLUSION.
# Names in the unnamed namespaces of one target must therefore differ; clang-tidy, which reads file by file,
# finds an include that is missing.
option(CAPSTAN_UNITY "compile several sources at a time" ON)
function(capstan_unity target)
  if(CAPSTAN_UNITY)
    # At the end of the directory, when the properties of its sources are known.
    cmake_language(EVAL CODE "cmake_language(DEFER CALL capstan_write_unity_files ${target})")
  endif()
endfunction()
function(capstan_write_unity_files target)
  get_target_property(sources ${target} SOURCES)
  set(remaining "")
  set(count 0)
  foreach(source ${sources})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE OUTPUT_VARIABLE path)
    cmake_path(IS_PREFIX PROJECT_BINARY_DIR ${path} alone)
    foreach(property SKIP_UNITY_BUILD_INCLUSION COMPILE_OPTIONS COMPILE_DEFINITIONS INCLUDE_DIRECTORIES)
      get_source_file_property(value ${source} ${property})
      if(value)
        set(alone TRUE)
      endif()
    endforeach()
    if(alone OR NOT path MATCHES "[.]cpp$")
      list(APPEND remaining ${source})
      continue()
    endif()
    cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    math(EXPR batch "${count} / 8")
    string(APPEND includes_${batch} "#include \"${path}\"\n")
    math(EXPR count "${count} + 1")
  endforeach()
  set(batch 0)
  while(DEFINED includes_${batch})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/unity/${target}_${batch}.cpp)
    file(CONFIGURE OUTPUT ${file} CONTENT "${includes_${batch}}" @ONLY)
    list(APPEND remaining ${file})
    math(EXPR batch "${batch} + 1")
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${remaining}")
endfunction()

# capstan_module(NAME SOURCES … [USES …] [LIBRARIES …] [ONE_THREAD] [FUZZED] [COLD] [APART])
#   One static library capstan_NAME from the sources of a module. USES names the modules that it uses,
#   LIBRARIES what it takes from outside (private: no module leaks its libraries' headers). ONE_THREAD: it
#   neither starts threads nor is used by several, or the thread sanitizer cannot follow its stacks; the
#   build of that sanitizer compiles it as the release build does, whose objects ccache has. FUZZED: fuzz
#   targets use it. COLD: no training step and no loading of data passes through it; less optimization saves
#   a quarter of the time to compile. APART: its sources use the same names for what each of them has, and
#   are compiled one by one.
set(CAPSTAN_COLD_OPTIONS $<$<CONFIG:Release>:-O1>)
function(capstan_module name)
  cmake_parse_arguments(MODULE "ONE_THREAD;FUZZED;COLD;APART" "" "SOURCES;USES;LIBRARIES" ${ARGN})
  add_library(capstan_${name} STATIC ${MODULE_SOURCES})
  target_include_directories(capstan_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}
                                                    ${PROJECT_SOURCE_DIR}/include)
  foreach(used ${MODULE_USES})
    target_link_libraries(capstan_${name} PUBLIC capstan_${used})
  endforeach()
  target_link_libraries(capstan_${name} PRIVATE ${MODULE_LIBRARIES})
  if(MODULE_FUZZED)
    target_compile_options(capstan_${name} PRIVATE ${CAPSTAN_FUZZ_OPTIONS})
  endif()
  set(kind module)
  if(MODULE_COLD)
    string(APPEND kind _cold)
    target_compile_options(capstan_${name} PRIVATE ${CAPSTAN_COLD_OPTIONS})
  endif()
  if(MODULE_ONE_THREAD)
    string(APPEND kind _one_thread)
  endif()
  if(MODULE_FUZZED AND CAPSTAN_FUZZ)
    string(APPEND kind _fuzzed)
  endif()
  if(MODULE_ONE_THREAD AND CAPSTAN_SANITIZE STREQUAL "thread")
    get_target_property(options capstan_${name} COMPILE_OPTIONS)
    list(REMOVE_ITEM options ${CAPSTAN_SANITIZE_OPTIONS})
    set_target_properties(capstan_${name} PROPERTIES COMPILE_OPTIONS "${options}")
  endif()
  if(NOT name MATCHES "^kernels")  # whose options are their own, and whose sources compile for long
    capstan_precompile(capstan_${name} ${kind})
    if(NOT MODULE_APART)
      capstan_unity(capstan_${name})
    endif()
  endif()
endfunction()

# capstan_test(NAME SOURCES … USES … [LIBRARIES …] [RANKS N …] [CPU_LEVELS LEVEL …] [LABELS …] [TIMEOUT S]
#              [PROCESSORS N] [SUITES SUITE …] [SERIAL] [OPTIMIZED] [PROCESS] [GPU] [SEVERAL_GPUS]
#              [ONE_SANITIZED] [MOST_SANITIZED])
#   One doctest program test_NAME, registered with CTest. The tests of a module share one program: doctest's
#   main is compiled once into capstan_test_main. RANKS N runs it under mpirun with N ranks (label `ranks`),
#   1 without mpirun; of several N all but 1 make the tests NAME_ranksN of the one program; sanitizers see
#   one rank and the most up to three, with MOST_SANITIZED the most, or with ONE_SANITIZED the fewest alone.
#   CPU_LEVELS makes the tests NAME_LEVEL, each with CAPSTAN_CPU=LEVEL; a test whose level this machine lacks
#   is reported as skipped. LABELS: the fast tier of scripts/test.sh leaves out those labeled `full` or
#   `slow`, sanitizers leave out `slow`; the oldest of the levels is `full`. TIMEOUT: seconds when the test
#   has its processors for itself, without sanitizers. SERIAL: it measures time, nothing runs beside it.
#   SUITES: the cases of each of these doctest suites make a test NAME_SUITE of their own: `one_process` takes
#   one processor, `timed` is SERIAL and of release builds, `full` has that label and is of builds without
#   sanitizers. OPTIMIZED: its references compute much, on one
#   thread; sanitizer builds optimize them too, and the thread sanitizer leaves them out. PROCESS: it starts
#   the program and compares texts; release builds do not optimize it, which saves a fifth of the time to
#   compile, and sanitizers see those that start one process at a time: the tests of the trainer run the same
#   code on several ranks. GPU: all of its cases are of a GPU. In a build with the CUDA backend, programs with
#   cases of EVERY_DEVICE, or of a part of it with GPUs, make a test NAME_gpu besides. Both have the label
#   `cuda`, and are reported as skipped where there is no GPU. BY_SOURCE: of a test with GPU; the cases of
#   each of these sources make a test NAME_SOURCE, so that several run at a time. SEVERAL_GPUS: GPU, with a
#   GPU for each of two ranks (tests/support/nccl_gpus.hpp): the label `several_gpus` besides, and skipped
#   where there is one.
function(capstan_test name)
  cmake_parse_arguments(TEST
    "SERIAL;OPTIMIZED;PROCESS;GPU;SEVERAL_GPUS;ONE_SANITIZED;MOST_SANITIZED" "TIMEOUT;PROCESSORS"
    "SOURCES;USES;LIBRARIES;LABELS;RANKS;CPU_LEVELS;SUITES;BY_SOURCE" ${ARGN})
  if(CAPSTAN_SANITIZE AND ("slow" IN_LIST TEST_LABELS OR (TEST_PROCESS AND TEST_PROCESSORS GREATER 1)))
    return()
  endif()
  if(TEST_SEVERAL_GPUS)
    set(TEST_GPU TRUE)
    list(APPEND TEST_SOURCES ${PROJECT_SOURCE_DIR}/tests/support/several_gpus.cpp
      ${PROJECT_SOURCE_DIR}/tests/support/fake_cuda.cpp ${PROJECT_SOURCE_DIR}/tests/support/fake_nccl.cpp)
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  target_link_libraries(test_${name} PRIVATE capstan_test_main doctest::doctest ${TEST_LIBRARIES})
  foreach(used ${TEST_USES})
    target_link_libraries(test_${name} PRIVATE capstan_${used})
  endforeach()
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  if(TEST_SEVERAL_GPUS)
    target_compile_definitions(test_${name} PRIVATE CAPSTAN_SEVERAL_GPUS=1)
  endif()
  if(CAPSTAN_SANITIZE AND TEST_OPTIMIZED)
    set(kind test_optimized)
  else()
    set(kind test)
  endif()
  if(CAPSTAN_SANITIZE)
    target_compile_definitions(test_${name} PRIVATE CAPSTAN_SANITIZED=1)  # tests/support/sanitized.hpp
  endif()
  if(CAPSTAN_SANITIZE STREQUAL "thread" AND TEST_OPTIMIZED)
    target_compile_options(test_${name} PRIVATE -fno-sanitize=thread)  # its references run on one thread
  elseif(CAPSTAN_SANITIZE AND NOT TEST_OPTIMIZED)
    # Half the time to compile; what is tested keeps its level.
    target_compile_options(test_${name} PRIVATE -O0)
  elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
    if(TEST_PROCESS)
      target_compile_options(test_${name} PRIVATE -O0)
      set(kind test_process)
    else()
      target_compile_options(test_${name} PRIVATE -O1)  # 30 % less time to compile
    endif()
    target_compile_definitions(test_${name} PRIVATE CAPSTAN_TIMED=1)  # times mean something here only
  endif()
  capstan_precompile(test_${name} ${kind})
  capstan_unity(test_${name})
  set(TEST_HAS_GPU FALSE)
  if(CAPSTAN_CUDA AND NOT TEST_GPU)
    foreach(source ${TEST_SOURCES})
      if(source MATCHES "[.]cpp$")
        file(STRINGS ${source} found LIMIT_COUNT 1
          REGEX "EVERY_DEVICE|on_every_device|FAST_DEVICES|CUDA_KERNEL_DEVICES|OWN_MEMORY_DEVICES")
        if(found)
          set(TEST_HAS_GPU TRUE)
        endif()
      endif()
    endforeach()
  endif()
  if(TEST_HAS_GPU)
    # Once more on a GPU (tests/support/devices.hpp): NAME_gpu.
    target_sources(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/gpu.cpp)
    target_compile_definitions(test_${name} PRIVATE CAPSTAN_TEST_GPU=1)
  endif()
  if(TEST_HAS_GPU OR TEST_GPU)
    add_dependencies(test_${name} capstan_cuda)
    if(NOT TARGET gpu_tests)
      add_custom_target(gpu_tests)  # scripts/gpu_check.sh
    endif()
    add_dependencies(gpu_tests test_${name})
  endif()
  if(NOT TEST_RANKS)
    set(TEST_RANKS 1)
  endif()
  list(LENGTH TEST_RANKS worlds)
  if(CAPSTAN_SANITIZE AND worlds GREATER 1)
    list(SORT TEST_RANKS COMPARE NATURAL)
    if(TEST_ONE_SANITIZED)
      list(GET TEST_RANKS 0 TEST_RANKS)
    else()
      # Four ranks on two cores take several times as long: those take them whose layouts need four.
      if(NOT TEST_MOST_SANITIZED)
        list(FILTER TEST_RANKS INCLUDE REGEX "^[123]$")
      endif()
      list(GET TEST_RANKS -1 most)
      list(FILTER TEST_RANKS INCLUDE REGEX "^(1|${most})$")
    endif()
  endif()
  foreach(ranks ${TEST_RANKS})
    if(ranks EQUAL 1)
      set(test ${name})
    elseif(worlds GREATER 1)
      set(test ${name}_ranks${ranks})
    else()
      set(test ${name})
    endif()
    capstan_register_test(${test} ${name} ${ranks})
  endforeach()
  if("threaded" IN_LIST TEST_LABELS)
    if(NOT TARGET threaded_tests)
      add_custom_target(threaded_tests)  # what the thread sanitizer looks at
    endif()
    add_dependencies(threaded_tests test_${name})
  endif()
endfunction()

# The CTest entries of program test_NAME with that many ranks, by the arguments that capstan_test has parsed.
function(capstan_register_test test name ranks)
  set(labels ${TEST_LABELS})
  set(command $<TARGET_FILE:test_${name}>)
  if(ranks GREATER 1)
    list(REMOVE_ITEM labels threaded)  # Open MPI's own threads are none of ours
    list(APPEND labels ranks)
    set(command ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
      ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${command})
  endif()
  if(TEST_BY_SOURCE)
    foreach(source ${TEST_BY_SOURCE})
      get_filename_component(part ${source} NAME_WE)
      capstan_register_gpu_test(${test}_${part} ${ranks} "${command};--source-file=*/${part}.cpp")
    endforeach()
    return()
  elseif(TEST_GPU)
    capstan_register_gpu_test(${test} ${ranks} "${command}")
    return()
  endif()
  set(timeout ${TEST_TIMEOUT})
  if(NOT timeout AND "slow" IN_LIST labels)
    set(timeout 1200)
  elseif(NOT timeout)
    set(timeout 240)
  endif()
  set(serial ${TEST_SERIAL})
  if(CAPSTAN_SANITIZE)
    math(EXPR timeout "4 * ${timeout}")
    set(serial FALSE)  # times mean nothing
  else()
    set(levels ${TEST_CPU_LEVELS})
  endif()
  if(NOT levels)
    if(CAPSTAN_SANITIZE OR NOT CMAKE_BUILD_TYPE STREQUAL "Release")
      list(REMOVE_ITEM TEST_SUITES timed)
    endif()
    set(others ${TEST_SUITES})
    list(JOIN others , others)
    list(TRANSFORM others PREPEND -tse=)
    if(CAPSTAN_SANITIZE)
      list(REMOVE_ITEM TEST_SUITES full)
    endif()
    add_test(NAME ${test} COMMAND ${command} ${others})
    set(tests ${test})
    foreach(suite ${TEST_SUITES})
      add_test(NAME ${test}_${suite} COMMAND ${command} -ts=${suite})
      list(APPEND tests ${test}_${suite})
    endforeach()
  endif()
  if(TEST_HAS_GPU)
    capstan_register_gpu_test(${test}_gpu ${ranks} "${command}")
  endif()
  foreach(level ${levels})
    add_test(NAME ${test}_${level} COMMAND ${command})
    # 77: tests/main.cpp, where the processor lacks the level.
    set_tests_properties(${test}_${level} PROPERTIES ENVIRONMENT CAPSTAN_CPU=${level} SKIP_RETURN_CODE 77)
    list(APPEND tests ${test}_${level})
  endforeach()
  set(processors ${ranks})
  if(TEST_PROCESSORS)  # the test starts ranks itself
    set(processors ${TEST_PROCESSORS})
  endif()
  set_tests_properties(${tests} PROPERTIES
    LABELS "${labels}" TIMEOUT ${timeout} PROCESSORS ${processors} RUN_SERIAL ${serial})
  if(sse4 IN_LIST levels)  # of few machines
    set_tests_properties(${test}_sse4 PROPERTIES LABELS "${labels};full")
  endif()
  if("full" IN_LIST TEST_SUITES)
    set_tests_properties(${test}_full PROPERTIES LABELS "${labels};full")
  endif()
  if("one_process" IN_LIST TEST_SUITES)
    list(REMOVE_ITEM labels ranks)
    set_tests_properties(${test}_one_process PROPERTIES LABELS "${labels}" PROCESSORS 1)
    if("slow" IN_LIST labels)
      set_tests_properties(${test}_one_process PROPERTIES COST 100)  # begins first, as cli_memory
    endif()
  endif()
  if("timed" IN_LIST TEST_SUITES)
    set_tests_properties(${test}_timed PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# The CTest entry of a command whose program runs on a GPU. 77: tests/main.cpp, where there is none.
function(capstan_register_gpu_test test ranks command)
  add_test(NAME ${test} COMMAND ${command})
  set_tests_properties(${test} PROPERTIES ENVIRONMENT CAPSTAN_TEST_DEVICE=cuda SKIP_RETURN_CODE 77
    LABELS cuda TIMEOUT 540 PROCESSORS ${ranks} RESOURCE_LOCK gpu)
  if(TEST_SEVERAL_GPUS)
    set_property(TEST ${test} APPEND PROPERTY LABELS several_gpus)
  endif()
endfunction()
