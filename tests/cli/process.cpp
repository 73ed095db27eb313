#include "process.hpp"
#include "base/actions.hpp"
#include "base/json.hpp"
#include "support/paths.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace capstan::test {

namespace {

const std::string kProgram = std::string(capstan::test::kBinaryDirectory) + "/capstan";

// The environment without the terminal and color settings of the user; a sanitizer's settings stay.
std::vector<std::string> environment_of(const Launch& launch) {
  std::vector<std::string> all = {"TERM=xterm", "LC_ALL=C.UTF-8", "OMPI_ALLOW_RUN_AS_ROOT=1",
                                  "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
  for (const char* name : {"PATH", "HOME", "TMPDIR", "ASAN_OPTIONS", "LSAN_OPTIONS", "UBSAN_OPTIONS",
                           "TSAN_OPTIONS", "LD_LIBRARY_PATH", "CAPSTAN_CPU"})
    if (const char* value = std::getenv(name)) all.push_back(std::string(name) + "=" + value);
  // Memory that Open MPI leaks under mpirun was allocated by modules that are unloaded when the leaks are
  // reported, so that no suppression can name them.
  const auto& words = launch.arguments;
  if (std::find(words.begin(), words.end(), "--nproc") != words.end())
    for (std::string& variable : all)
      if (variable.starts_with("ASAN_OPTIONS=")) variable += ":detect_leaks=0";
  all.insert(all.end(), launch.environment.begin(), launch.environment.end());
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Finished run(const Launch& launch) {
  std::vector<std::string> words = {kProgram};
  words.insert(words.end(), launch.arguments.begin(), launch.arguments.end());
  std::vector<std::string> variables = environment_of(launch);
  const auto argv = pointers(words), envp = pointers(variables);
  int in[2], out[2], err[2];
  if (::pipe2(in, O_CLOEXEC) || ::pipe2(out, O_CLOEXEC) || ::pipe2(err, O_CLOEXEC))
    throw std::runtime_error("pipe");
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    ::dup2(in[0], 0);
    ::dup2(launch.out_file.empty() ? out[1] : ::open(launch.out_file.c_str(), O_WRONLY), 1);
    ::dup2(err[1], 2);
    if (!launch.directory.empty() && ::chdir(launch.directory.c_str()) != 0) ::_exit(126);
    ::execve(kProgram.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(in[0]), ::close(out[1]), ::close(err[1]);
  // Small inputs only: they fit into the pipe.
  if (!launch.input.empty() && ::write(in[1], launch.input.data(), launch.input.size()) < 0)
    throw std::runtime_error("write");
  ::close(in[1]);

  Finished result;
  bool killed = false;
  pollfd wait[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  int open = 2;
  while (open > 0) {
    ::poll(wait, 2, 100);
    for (int i = 0; i < 2; ++i) {
      if (wait[i].fd < 0 || !(wait[i].revents & (POLLIN | POLLHUP))) continue;
      char buffer[65536];
      const ssize_t got = ::read(wait[i].fd, buffer, sizeof buffer);
      if (got <= 0) {
        wait[i].fd = -1;
        --open;
        continue;
      }
      std::string& text = i == 0 ? result.out : result.err;
      text.append(buffer, static_cast<size_t>(got));
      if (i == 0) continue;
      if (result.first_line_seconds == 0 && contains(text, "\n")) result.first_line_seconds = elapsed();
      if (launch.on_error_text)
        if (const int signal = launch.on_error_text(text, child)) ::kill(child, signal);
    }
    if (elapsed() > launch.time_limit && !killed) {
      ::kill(child, SIGKILL);
      killed = true;
    }
  }
  ::close(out[0]), ::close(err[0]);
  int status = 0;
  rusage usage{};
  ::wait4(child, &status, 0, &usage);
  result.seconds = elapsed();
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  result.cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime);
  result.resident_mib = static_cast<double>(usage.ru_maxrss) / 1024;
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (killed) result.err += "\n(the test ended it: it ran for too long)\n";
  // No output shows the marker of an action in place of its words.
  for (const Action& action : plain_action_words())
    for (const std::string& text : {result.out, result.err})
      if (contains(text, "{" + std::string(action.name) + "}"))
        throw std::runtime_error("the marker {" + std::string(action.name) + "} is printed:\n" + text);
  return result;
}

Finished run(std::vector<std::string> arguments) {
  Launch launch;
  launch.arguments = std::move(arguments);
  return run(launch);
}

std::vector<int> children_of(int process) {
  const std::string number = std::to_string(process);
  std::istringstream text(read_text("/proc/" + number + "/task/" + number + "/children"));
  std::vector<int> children;
  for (int child = 0; text >> child;) children.push_back(child);
  return children;
}

void LateKill::start(int process, std::chrono::microseconds delay) {
  start([process] { return process; }, delay);
}
void LateKill::start(std::function<int()> victim, std::chrono::microseconds delay) {
  waiting_ = std::thread([this, victim = std::move(victim), delay] {
    std::this_thread::sleep_for(delay);
    if (!over_) ::kill(victim(), SIGKILL);
  });
}
void LateKill::cancel() {
  over_ = true;
  if (waiting_.joinable()) waiting_.join();
}

std::vector<std::string> every_recipe() {
  std::vector<std::string> names;
  const auto listed = capstan::json_of(run({"recipe", "ls", "--json"}).out);
  for (const auto& recipe : listed["recipes"]) names.push_back(recipe["name"]);
  return names;
}

std::vector<std::string> tiny_recipe(const std::vector<std::string>& more) {
  std::vector<std::string> words{"quickstart",
                                 "dataset=mock",
                                 "tokenizer=none",
                                 "model.num_layers=1",
                                 "model.hidden_size=32",
                                 "model.ffn_hidden_size=64",
                                 "model.num_attention_heads=4",
                                 "model.num_query_groups=2",
                                 "model.seq_length=16",
                                 "model.vocab_size=256",
                                 "train.micro_batch_size=1",
                                 "train.global_batch_size=2",
                                 "validation.eval_interval=null",
                                 "logger.log_interval=1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}
std::vector<std::string> train_tiny(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = tiny_recipe({"train.threads=1"});
  arguments.insert(arguments.begin(), "train");
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

int count_lines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
std::function<int(const std::string&, int)> signal_at(std::string moment, int signal, int milliseconds) {
  return [=, sent = false](const std::string& text, int) mutable {
    if (sent || !contains(text, moment)) return 0;
    sent = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return signal;
  };
}

ScratchDirectory::ScratchDirectory() {
  path_ = (std::filesystem::temp_directory_path() / "capstan-cli-XXXXXX").string();
  if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp");
}
ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}
std::string ScratchDirectory::write(const std::string& name, const std::string& text) const {
  std::ofstream(file(name), std::ios::binary) << text;
  return file(name);
}
std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

Finished run_in(const ScratchDirectory& scratch, std::vector<std::string> arguments) {
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = std::move(arguments);
  return run(launch);
}

Finished train_in(const ScratchDirectory& scratch, const std::vector<std::string>& more,
                  std::function<int(const std::string&, int)> react) {
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = train_tiny(more);
  launch.on_error_text = std::move(react);
  return run(launch);
}

}  // namespace capstan::test
