// A program of cases that are not those of a GPU, on a machine that has one: tests/main.cpp reports that
// nothing has run.
#include <doctest/doctest.h>

#include <string>

namespace capstan::test {

bool runs_on_gpu() {
  return true;
}
std::string gpu_problem() {
  return "";
}

}  // namespace capstan::test

TEST_CASE("of the CPU") {}
