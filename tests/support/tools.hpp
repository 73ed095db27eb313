// Tools and rights that a test needs and a machine may lack.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

namespace capstan::test {

// Whether the test can run. Where it cannot, a line says so; under CI (the environment variable CI is set,
// and not to 0) the test fails, because the line would not be read.
inline bool require_present(bool present, const std::string& what) {
  if (present) return true;
  const char* const ci = std::getenv("CI");
  const bool strict = ci && *ci && std::string(ci) != "0" && std::string(ci) != "false";
  if (strict)
    FAIL_CHECK("under CI this must run, and there is no ", what);
  else
    MESSAGE("not run: no ", what);
  return false;
}

// A program on the PATH; `scripts/install.sh` installs all that the tests use.
inline bool require_tool(const std::string& tool) {
  return require_present(std::system(("command -v " + tool + " >/dev/null 2>&1").c_str()) == 0, tool);
}

}  // namespace capstan::test
