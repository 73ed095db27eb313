# `cmake --install` installs for other programs: the headers of include/, one static library `libcapstan.a`
# with all modules, a CMake package (find_package(capstan), target capstan::capstan) and a pkg-config file.
# Component `library` is everything here. An installation without --component skips it if the library has not
# been built, as in a tree in which only the program was built. The program installs itself (src/cli).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# How a program that links the installed library finds each library that the modules use: NAME, the line of
# the CMake package, what it links, and what the pkg-config file requires or links (`module:` or a linker
# argument).
set(CAPSTAN_EXTERNALS
  "Threads::Threads|find_dependency(Threads)|Threads::Threads|-pthread"
  "yaml-cpp|find_dependency(yaml-cpp)|yaml-cpp|module:yaml-cpp"
  "spdlog::spdlog|find_dependency(spdlog)|spdlog::spdlog|module:spdlog"
  "simdjson::simdjson|find_dependency(simdjson)|simdjson::simdjson|module:simdjson"
  "ZLIB::ZLIB|find_dependency(ZLIB)|ZLIB::ZLIB|module:zlib"
  "MPI::MPI_CXX|find_dependency(MPI COMPONENTS CXX)|MPI::MPI_CXX|${MPI_mpi_LIBRARY}"
  "Boost::context|find_dependency(Boost COMPONENTS context)|Boost::context|-lboost_context"
  "PkgConfig::ZSTD||-lzstd|module:libzstd"
  "PkgConfig::ONIGURUMA||-lonig|module:oniguruma"
  "PkgConfig::UTF8PROC||-lutf8proc|module:libutf8proc"
  "PkgConfig::XXHASH||-lxxhash|module:libxxhash"
  "capstan_dnnl||-ldnnl|-ldnnl"
  "dl||-ldl|-ldl"
  "nlohmann_json::nlohmann_json|||")  # headers only

# The modules that `target` uses, itself included, and the libraries from outside:
# lists `modules` and `externals`.
function(capstan_collect target)
  if(target MATCHES "^capstan_" AND NOT target STREQUAL "capstan_dnnl")
    get_property(seen GLOBAL PROPERTY CAPSTAN_COLLECTED_MODULES)
    if(target IN_LIST seen)
      return()
    endif()
    set_property(GLOBAL APPEND PROPERTY CAPSTAN_COLLECTED_MODULES ${target})
    get_target_property(used ${target} LINK_LIBRARIES)
    foreach(library IN LISTS used)
      if(library)
        capstan_collect(${library})
      endif()
    endforeach()
  else()
    set_property(GLOBAL APPEND PROPERTY CAPSTAN_COLLECTED_EXTERNALS ${target})
  endif()
endfunction()

# capstan_install_library(TARGET): installs the module TARGET and all that it uses as one library. Call it at
# the end of a directory, whose further rules are skipped if the library has not been built.
function(capstan_install_library target)
  capstan_collect(${target})
  get_property(modules GLOBAL PROPERTY CAPSTAN_COLLECTED_MODULES)
  get_property(externals GLOBAL PROPERTY CAPSTAN_COLLECTED_EXTERNALS)
  list(REMOVE_DUPLICATES externals)
  set(objects)
  foreach(module IN LISTS modules)
    list(APPEND objects $<TARGET_OBJECTS:${module}>)
  endforeach()
  add_library(capstan_library STATIC ${objects})
  set_target_properties(capstan_library PROPERTIES
    OUTPUT_NAME capstan EXPORT_NAME capstan LINKER_LANGUAGE CXX
    ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/library)
  target_include_directories(capstan_library INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(capstan_library INTERFACE cxx_std_20)

  set(CAPSTAN_DEPENDENCIES "")
  set(CAPSTAN_REQUIRES "")
  set(CAPSTAN_LIBS "")
  foreach(external IN LISTS externals)
    set(known FALSE)
    foreach(entry IN LISTS CAPSTAN_EXTERNALS)
      string(REPLACE "|" ";" entry "${entry}")
      list(GET entry 0 name)
      if(NOT name STREQUAL external)
        continue()
      endif()
      set(known TRUE)
      list(GET entry 1 package)
      list(GET entry 2 link)
      list(GET entry 3 pc)
      if(package)
        string(APPEND CAPSTAN_DEPENDENCIES "${package}\n")
      endif()
      if(link)
        target_link_libraries(capstan_library INTERFACE "$<INSTALL_INTERFACE:${link}>")
      endif()
      if(pc MATCHES "^module:(.*)")
        string(APPEND CAPSTAN_REQUIRES " ${CMAKE_MATCH_1}")
      elseif(pc)
        string(APPEND CAPSTAN_LIBS " ${pc}")
      endif()
    endforeach()
    if(NOT known)
      message(FATAL_ERROR
        "cmake/Install.cmake does not say how a program that uses the installed library finds `${external}`")
    endif()
  endforeach()

  set(package ${CMAKE_INSTALL_LIBDIR}/cmake/capstan)
  file(RELATIVE_PATH CAPSTAN_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" CAPSTAN_PC_PREFIX "${CAPSTAN_PC_PREFIX}")
  set(generated ${CMAKE_BINARY_DIR}/package)
  configure_package_config_file(
    ${PROJECT_SOURCE_DIR}/cmake/capstanConfig.cmake.in ${generated}/capstanConfig.cmake
    INSTALL_DESTINATION ${package} NO_SET_AND_CHECK_MACRO)
  write_basic_package_version_file(${generated}/capstanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/capstan.pc.in ${generated}/capstan.pc @ONLY)

  install(CODE "
    if(NOT CMAKE_INSTALL_COMPONENT AND NOT EXISTS \"$<TARGET_FILE:capstan_library>\")
      message(STATUS \"Not installed: the library, because capstan_library has not been built\")
      return()
    endif()" COMPONENT library)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/capstan TYPE INCLUDE COMPONENT library)
  install(TARGETS capstan_library EXPORT capstan ARCHIVE COMPONENT library)
  install(EXPORT capstan NAMESPACE capstan:: FILE capstanTargets.cmake
    DESTINATION ${package} COMPONENT library)
  install(FILES ${generated}/capstanConfig.cmake ${generated}/capstanConfigVersion.cmake
    DESTINATION ${package} COMPONENT library)
  install(FILES ${generated}/capstan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    COMPONENT library)
endfunction()
