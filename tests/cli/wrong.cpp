// Wrong recipes and command lines, with the exact answer: tests/cli/wrong/. A case named "(complaint N)" is
// one that users of other trainers have complained of. Those without a case are no mistakes that could be
// answered: 36 asks for help on fields (`explain`, docs/reference), and 40, 41, 42 and 47, how a sweep fails,
// is queued, split and extended, are tested by sweep.cpp here and tests/sweep/.
#include <doctest/doctest.h>

#include "cases.hpp"

TEST_CASE("every mistake has its answer, word for word") {
  CHECK(capstan::test::run_cases("wrong") >= 60);
}
