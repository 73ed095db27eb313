// Where the tests find the source tree and the build. Functions of tests/main.cpp, because a macro with an
// absolute path would keep two checkouts from sharing what the compiler cache holds.
#pragma once

namespace capstan::test {

extern const char* const kSourceDirectory;
extern const char* const kBinaryDirectory;

}  // namespace capstan::test
