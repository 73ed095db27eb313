# capstan_room(NAME SOURCES … [USES …] [LIBRARIES …])
#   One static library capstan_NAME from the sources of a room. USES names the rooms it stands on, LIBRARIES what it
#   takes from outside (private: no room leaks its libraries' headers).
function(capstan_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;USES;LIBRARIES" ${ARGN})
  add_library(capstan_${name} STATIC ${ROOM_SOURCES})
  target_include_directories(capstan_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}
                                                    ${PROJECT_SOURCE_DIR}/include)
  foreach(used ${ROOM_USES})
    target_link_libraries(capstan_${name} PUBLIC capstan_${used})
  endforeach()
  target_link_libraries(capstan_${name} PRIVATE ${ROOM_LIBRARIES})
endfunction()

# capstan_test(NAME SOURCES … USES … [LIBRARIES …] [RANKS N …] [LABELS …] [TIMEOUT S] [SERIAL])
#   One doctest program test_NAME, registered with CTest. The tests of a room share one program: doctest's main is
#   compiled once into capstan_test_main. RANKS N runs it under mpirun with N ranks (label `ranks`), 1 without mpirun;
#   of several N all but 1 make the tests NAME_ranksN of the one program. SERIAL: it measures time, nothing runs beside it.
function(capstan_test name)
  cmake_parse_arguments(TEST "SERIAL" "TIMEOUT" "SOURCES;USES;LIBRARIES;LABELS;RANKS" ${ARGN})
  if(CAPSTAN_SANITIZE AND "slow" IN_LIST TEST_LABELS)
    return()
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  target_link_libraries(test_${name} PRIVATE capstan_test_main doctest::doctest ${TEST_LIBRARIES})
  foreach(used ${TEST_USES})
    target_link_libraries(test_${name} PRIVATE capstan_${used})
  endforeach()
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  if(CAPSTAN_SANITIZE)
    target_compile_options(test_${name} PRIVATE -O0)  # half the time to compile; what is tested keeps its level
  elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_definitions(test_${name} PRIVATE CAPSTAN_TIMED=1)  # times mean something here only
  endif()
  if(NOT TEST_RANKS)
    set(TEST_RANKS 1)
  endif()
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 900)  # the slowest under a sanitizer on a busy machine
  endif()
  list(LENGTH TEST_RANKS worlds)
  foreach(ranks ${TEST_RANKS})
    set(test ${name})
    set(labels ${TEST_LABELS})
    if(ranks EQUAL 1)
      add_test(NAME ${test} COMMAND test_${name})
    else()
      if(worlds GREATER 1)
        set(test ${name}_ranks${ranks})
      endif()
      list(REMOVE_ITEM labels threaded)  # Open MPI's own threads are none of ours
      list(APPEND labels ranks)
      add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
                                    ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:test_${name}>)
    endif()
    set_tests_properties(${test} PROPERTIES LABELS "${labels}" TIMEOUT ${TEST_TIMEOUT} RUN_SERIAL ${TEST_SERIAL})
  endforeach()
  if("threaded" IN_LIST TEST_LABELS)
    if(NOT TARGET threaded_tests)
      add_custom_target(threaded_tests)  # what the thread sanitizer looks at
    endif()
    add_dependencies(threaded_tests test_${name})
  endif()
endfunction()
