# Installs the program as from a tree BUILD in which nothing else was built, and runs it. Then installs
# everything, and the library alone into a second prefix, which it moves to build and run a copy of EXAMPLE
# against it: with find_package, and with pkg-config.
include(${CMAKE_CURRENT_LIST_DIR}/../support/run.cmake)

set(scratch ${BUILD}/install_test)
file(REMOVE_RECURSE ${scratch})

file(REMOVE_RECURSE ${BUILD}/library_aside)
file(RENAME ${BUILD}/library ${BUILD}/library_aside)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${scratch}/program
                RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
file(RENAME ${BUILD}/library_aside ${BUILD}/library)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "without the library, cmake --install ended with ${code}:\n${output}")
endif()
run(${scratch}/program/bin/capstan check quickstart dataset=mock tokenizer=none)
foreach(file share/man/man1/capstan-train.1 share/bash-completion/completions/capstan)
  if(NOT EXISTS ${scratch}/program/${file})
    message(FATAL_ERROR "cmake --install did not install ${file}")
  endif()
endforeach()
if(EXISTS ${scratch}/program/include)
  message(FATAL_ERROR "cmake --install installed headers without the library")
endif()

run(${CMAKE_COMMAND} --install ${BUILD} --component library --prefix ${scratch}/first)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${scratch}/complete)
file(GLOB_RECURSE files RELATIVE ${scratch}/first ${scratch}/first/*)
foreach(file IN LISTS files ITEMS bin/capstan)
  if(NOT EXISTS ${scratch}/complete/${file})
    message(FATAL_ERROR "cmake --install did not install ${file}")
  endif()
endforeach()
set(prefix ${scratch}/elsewhere)  # a package that holds its prefix is noticed
file(RENAME ${scratch}/first ${prefix})

# Headers name nothing but the standard library and themselves.
file(GLOB headers ${prefix}/include/capstan/*.hpp)
foreach(header IN LISTS headers)
  file(STRINGS ${header} forbidden REGEX "#include (\"[^c]|<.*[./])|#if|mpi\\.h")
  if(forbidden)
    message(FATAL_ERROR "${header} holds ${forbidden}")
  endif()
endforeach()

file(COPY ${EXAMPLE}/main.cpp ${EXAMPLE}/CMakeLists.txt DESTINATION ${scratch}/project)
run(${CMAKE_COMMAND} -S ${scratch}/project -B ${scratch}/project/build -DCMAKE_PREFIX_PATH=${prefix}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=-Werror\ -Wall\ -Wextra\ -Wshadow)
run(${CMAKE_COMMAND} --build ${scratch}/project/build)
run(${scratch}/project/build/embed ${scratch}/run)
if(NOT output MATCHES "step 8 of 8: loss ")
  message(FATAL_ERROR "the program says\n${output}")
endif()

file(GLOB_RECURSE pc ${prefix}/*/capstan.pc)
get_filename_component(pc_directory ${pc} DIRECTORY)
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_directory} pkg-config --cflags --libs capstan)
string(STRIP "${output}" flags)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CXX} ${scratch}/project/main.cpp -o ${scratch}/embed_pc ${flags})
run(${scratch}/embed_pc ${scratch}/run_pc)
file(REMOVE_RECURSE ${scratch})
