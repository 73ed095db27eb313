// Wrong recipes and command lines, with the exact answer: tests/cli/wrong/. Many are mistakes of which users
// of other trainers have complained.
#include <doctest/doctest.h>

#include "cases.hpp"

TEST_CASE("every mistake has its answer, word for word") {
  CHECK(capstan::test::run_cases("wrong") >= 60);
}
