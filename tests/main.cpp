#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "support/paths.hpp"

namespace capstan::test {

constinit const char* const kSourceDirectory = CAPSTAN_SOURCE_DIR;
constinit const char* const kBinaryDirectory = CAPSTAN_BINARY_DIR;

}  // namespace capstan::test
