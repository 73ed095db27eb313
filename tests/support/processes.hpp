// Processes of tests: what a command says, and whether something crashes.
#pragma once

#include <doctest/doctest.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <string>

namespace capstan::test {

// -1: ended by a signal.
inline int exit_code(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Ended {
  int code;
  // Both outputs.
  std::string text;
};
// A world of `ranks` processes of a program, for at most a minute.
inline Ended run_ranks(int ranks, const std::string& program, const std::string& arguments) {
  const std::string command = "timeout 60 mpirun -q -n " + std::to_string(ranks) +
                              " --oversubscribe --allow-run-as-root '" + program + "' " + arguments +
                              " 2>&1 </dev/null";
  FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe);
  std::string text;
  char buffer[4096];
  while (::fgets(buffer, sizeof buffer, pipe)) text += buffer;
  return {exit_code(::pclose(pipe)), text};
}

inline constexpr int kCrashed = 42;
// Runs `act` in a child: kCrashed when it touched memory that it may not touch, else 0. The child has this
// thread only.
inline int fate_of(const std::function<void()>& act) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, [](int) { ::_exit(kCrashed); });
    act();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return exit_code(status);
}

}  // namespace capstan::test
