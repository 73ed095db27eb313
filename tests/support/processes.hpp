// Processes of tests: what a command says, and whether something crashes.
#pragma once

#include <doctest/doctest.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <future>
#include <string>
#include <vector>

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

// A world for each of these arguments, three at a time: for worlds that wait for time-outs.
inline std::vector<Ended> run_worlds(int ranks, const std::string& program,
                                     const std::vector<std::string>& arguments) {
  constexpr size_t kAtATime = 3;
  std::vector<std::future<Ended>> running;
  for (const std::string& one : arguments) {
    if (running.size() >= kAtATime) running[running.size() - kAtATime].wait();
    running.push_back(std::async(std::launch::async, [&] { return run_ranks(ranks, program, one); }));
  }
  std::vector<Ended> ended;
  for (auto& one : running) ended.push_back(one.get());
  return ended;
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
