# Gives the targets GTest::gmock and GTest::gtest_main, from the first place that has them: the sources that
# FETCHCONTENT_SOURCE_DIR_GOOGLETEST names (a CMake or an environment variable), the system's package, the sources that
# Debian's `googletest` package leaves in /usr/src, a download.
if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST AND DEFINED ENV{FETCHCONTENT_SOURCE_DIR_GOOGLETEST})
  set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST $ENV{FETCHCONTENT_SOURCE_DIR_GOOGLETEST})
endif()
if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
  find_package(GTest QUIET CONFIG)
  if(TARGET GTest::gmock AND TARGET GTest::gtest_main)
    message(STATUS "GoogleTest: the system's, ${GTest_VERSION}")
    return()
  endif()
  if(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest)
  endif()
endif()
if(FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
  message(STATUS "GoogleTest: sources in ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST}")
else()
  message(STATUS "GoogleTest: downloading 1.17.0")
endif()

include(FetchContent)
if(POLICY CMP0135)
  cmake_policy(SET CMP0135 NEW)
endif()
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
FetchContent_Declare(
  googletest
  URL https://github.com/google/googletest/releases/download/v1.17.0/googletest-1.17.0.tar.gz
  URL_HASH SHA256=65fab701d9829d38cb77c14acdc431d2108bfdbf8979e40eb8ae567edf10b27c)
FetchContent_MakeAvailable(googletest)

# googletest's own tree names its targets without the namespace before 1.11; its headers must not be held to our
# warnings.
foreach(name gtest gtest_main gmock)
  if(NOT TARGET GTest::${name})
    add_library(GTest::${name} ALIAS ${name})
  endif()
  get_target_property(include_dirs ${name} INTERFACE_INCLUDE_DIRECTORIES)
  set_target_properties(${name} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include_dirs}")
endforeach()
