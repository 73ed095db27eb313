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

# capstan_test(NAME SOURCES … USES … [LIBRARIES …] [RANKS N …] [LABELS …] [TIMEOUT S])
#   One doctest program test_NAME, registered with CTest. The tests of a room share one program: doctest's main is
#   compiled once into capstan_test_main. RANKS N runs it under mpirun with N ranks (label `ranks`);
#   several N make the tests NAME_ranksN of the one program.
function(capstan_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;USES;LIBRARIES;LABELS;RANKS" ${ARGN})
  if(CAPSTAN_FUZZ)
    return()
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  target_link_libraries(test_${name} PRIVATE capstan_test_main doctest::doctest ${TEST_LIBRARIES})
  foreach(used ${TEST_USES})
    target_link_libraries(test_${name} PRIVATE capstan_${used})
  endforeach()
  target_compile_definitions(test_${name} PRIVATE
    CAPSTAN_SOURCE_DIR="${PROJECT_SOURCE_DIR}" CAPSTAN_BINARY_DIR="${CMAKE_BINARY_DIR}")
  list(LENGTH TEST_RANKS worlds)
  set(names ${name})
  if(worlds GREATER 1)
    list(TRANSFORM TEST_RANKS PREPEND ${name}_ranks OUTPUT_VARIABLE names)
  endif()
  if(TEST_RANKS)
    foreach(test ranks IN ZIP_LISTS names TEST_RANKS)
      add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
                                    ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:test_${name}>)
    endforeach()
    list(APPEND TEST_LABELS ranks)
  else()
    add_test(NAME ${name} COMMAND test_${name})
  endif()
  if("threaded" IN_LIST TEST_LABELS)
    if(NOT TARGET threaded_tests)
      add_custom_target(threaded_tests)  # what the thread sanitizer looks at
    endif()
    add_dependencies(threaded_tests test_${name})
  endif()
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 900)  # the slowest under a sanitizer on a busy machine
  endif()
  set_tests_properties(${names} PROPERTIES LABELS "${TEST_LABELS}" TIMEOUT ${TEST_TIMEOUT})
endfunction()
