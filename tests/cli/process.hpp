// Runs the program as a user would, and returns its output and exit code.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace capstan::test {

struct Finished {
  // Exit code; 128 + signal when a signal ended the program.
  int code = 0;
  std::string out, err;
  // Wall-clock time until the end.
  double seconds = 0;
  // User and system time.
  double cpu_seconds = 0;
  // Time until the first line on standard error.
  double first_line_seconds = 0;
  // Peak resident memory of the program, or of one of its children.
  double resident_mib = 0;
};

struct Launch {
  // Without the program's name.
  std::vector<std::string> arguments;
  // "NAME=value", in addition to a plain environment.
  std::vector<std::string> environment;
  // Standard input.
  std::string input;
  // Working directory; empty: that of the test.
  std::string directory;
  // File for standard output; empty: Finished::out.
  std::string out_file;
  double time_limit = 120;
  // Called with the text of standard error so far whenever there is more; returns a signal to send, 0 for
  // none.
  std::function<int(const std::string& err, int process)> on_error_text;
};
Finished run(const Launch& launch);
Finished run(std::vector<std::string> arguments);

// The names that `recipe ls` lists.
std::vector<std::string> every_recipe();
// A recipe of a few thousand parameters on generated tokens, without evaluations, as words: its name, and
// what is changed.
std::vector<std::string> tiny_recipe(const std::vector<std::string>& more);
// `train` of it, on one thread.
std::vector<std::string> train_tiny(const std::vector<std::string>& more);

// SIGKILL for a process after a while, unless this goes away before.
class LateKill {
 public:
  void start(int process, std::chrono::microseconds delay);
  void start(std::function<int()> victim, std::chrono::microseconds delay);  // chosen then
  bool started() const { return waiting_.joinable(); }
  void cancel();
  LateKill() = default;
  LateKill(const LateKill&) = delete;
  LateKill& operator=(const LateKill&) = delete;
  ~LateKill() { cancel(); }

 private:
  std::atomic<bool> over_{false};
  std::thread waiting_;
};

// The processes that a process has started and that still run.
std::vector<int> children_of(int process);

int count_lines(const std::string& text);
bool contains(const std::string& text, const std::string& part);
// A Launch::on_error_text that sends one signal, some time after the text contains `moment`.
std::function<int(const std::string&, int)> signal_at(std::string moment, int signal, int milliseconds = 0);

// A directory that goes away with the object.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Returns the path.
  std::string write(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
};
std::string read_text(const std::string& path);

// Runs the program in a scratch directory.
Finished run_in(const ScratchDirectory& scratch, std::vector<std::string> arguments);
// `train` of the tiny recipe in a scratch directory; `react` as Launch::on_error_text.
Finished train_in(const ScratchDirectory& scratch, const std::vector<std::string>& more,
                  std::function<int(const std::string&, int)> react = {});

}  // namespace capstan::test
