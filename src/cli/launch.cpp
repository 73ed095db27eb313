#include "cli/launch.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "cli/recipe_input.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"
#include "comm/watchdog/rank_status.hpp"
#include "train/trainer/stop.hpp"

namespace capstan::cli {

namespace {

constexpr int64_t kMaxRanks = 4096;
// Separates the words of the parent's command in the ranks' environment.
constexpr char kWordSeparator = '\x1f';

// Written by the handler, read by the loop below.
volatile sig_atomic_t g_first_signal = 0, g_signals = 0;
volatile pid_t g_launcher = 0;

// Path of the stop file. While the file exists, the ranks save a checkpoint and end.
std::array<char, 64> g_stop_file{};
// The slots of the ranks.
const comm::Slot* g_slots = nullptr;
int64_t g_ranks = 0;
bool g_terminal = false;

// The slot of rank 0; null: it has not started.
const comm::Slot* rank0_slot() {
  for (int64_t i = 0; i < g_ranks; ++i) {
    const comm::Slot& slot = g_slots[i];
    if (slot.state.load() != static_cast<int32_t>(comm::RankState::absent) && slot.rank.load() == 0)
      return &slot;
  }
  return nullptr;
}

// Prints the answer to a request to stop.
void print_answer(std::string_view text) {
  // A rank's status line, and the ^C.
  const std::string_view clear = g_terminal ? "\r\x1b[K" : "";
  const auto part = [](std::string_view bytes) {
    return iovec{const_cast<char*>(bytes.data()), bytes.size()};
  };
  const iovec parts[] = {part(clear), part(text), part("\n")};
  // Standard error may be closed.
  if (::writev(STDERR_FILENO, parts, 3) < 0) return;
}

// Prints the phase of rank 0 and its expected end, from the rank status table.
void report_first_signal() {
  std::array<char, 192> buffer;
  std::array<char, 17> phase{};
  int64_t step = 0, expected_end = 0;
  if (const comm::Slot* slot = rank0_slot()) {
    phase = comm::RankStatusTable::phase_of(*slot);
    step = slot->step;
    expected_end = slot->expected_end;
  }
  print_answer(train::stop_notice(buffer, phase.data(), step, expected_end, comm::monotonic_ns()));
}

// Prints the checkpoint from which the run can resume; called after the ranks have ended.
void report_second_signal() {
  std::array<char, 192> buffer;
  const comm::Slot* slot = rank0_slot();
  print_answer(train::stopped_notice(buffer, slot ? slot->saved_steps - 1 : -1, -1));
}

void on_stop_signal(int signal) {
  const int error = errno;
  g_signals = g_signals + 1;
  if (g_first_signal == 0) g_first_signal = signal;
  if (g_signals == 1) {
    // A file, not a signal: mpirun and the ranks cannot miss it while they start.
    const int file = ::open(g_stop_file.data(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0) ::close(file);
    report_first_signal();
  } else if (g_launcher > 0) {
    // Ends the ranks and itself.
    ::kill(g_launcher, SIGTERM);
  }
  errno = error;
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  for (const std::string_view directory : split(path ? path : "", ':')) {
    std::string candidate = std::string(directory) + "/" + name;
    if (!directory.empty() && ::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  fail(ErrorCode::not_found, "`--nproc` needs `" + name + "`, which is not in PATH",
       "scripts/install.sh installs it (package openmpi-bin)");
}

// Starts a detached process that removes the files of a launch when this process and mpirun have ended, also
// by SIGKILL: it waits for the end of a pipe. Returns the write end for both of them, -1 if there is none.
int remove_after_launch(const std::string& directory, const std::string& status_table) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    const int null = ::open("/dev/null", O_RDWR);
    for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, standard);
    ::dup2(ends[0], 3);
    ::close_range(4, ~0U, 0);
    char byte = 0;
    while (::read(3, &byte, 1) < 0 && errno == EINTR) {
    }
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
    ::unlink(status_table.c_str());
    ::_exit(0);
  }
  ::close(ends[0]);
  if (child > 0) ::waitpid(child, nullptr, 0);
  return ends[1];
}

}  // namespace

std::string own_path() {
  std::error_code code;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", code);
  if (code) fail(ErrorCode::io, "cannot find the path of this program: " + code.message());
  return path.string();
}

bool has_parent() {
  return std::getenv("CAPSTAN_PARENT") != nullptr;
}

std::vector<std::string> given_command(const Context& context) {
  const char* parents = std::getenv("CAPSTAN_PARENT");
  if (!parents) return context.command_line;
  std::vector<std::string> words;
  for (const std::string_view word : split(parents, kWordSeparator)) words.emplace_back(word);
  return words;
}

namespace {

// The words after the program name, without --nproc and -C with their values.
std::vector<std::string> without_nproc(const std::vector<std::string>& command) {
  std::vector<std::string> rest;
  for (size_t i = 1; i < command.size(); ++i) {
    if (command[i] == "--") {
      rest.insert(rest.end(), command.begin() + static_cast<std::ptrdiff_t>(i), command.end());
      break;
    }
    // The parent is already in the directory.
    if (command[i] == "--nproc" || command[i] == "-C" || command[i] == "--directory")
      ++i;
    else if (!command[i].starts_with("--nproc=") && !command[i].starts_with("--directory=") &&
             !command[i].starts_with("-C"))
      rest.push_back(command[i]);
  }
  return rest;
}

std::vector<std::string> mpirun_command(const Context& context, int64_t ranks) {
  // Binding is left to the ranks' own thread pools: by default mpirun would pin each of two ranks to one
  // core.
  std::vector<std::string> words = {find_program("mpirun"), "-q",        "-n",  std::to_string(ranks),
                                    "--oversubscribe",      "--bind-to", "none"};
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  words.push_back(own_path());
  for (std::string& word : without_nproc(context.command_line)) words.push_back(std::move(word));
  return words;
}

// State that the parent and the ranks share while they run, and files that are removed after them.
class LaunchFiles {
 public:
  explicit LaunchFiles(int64_t ranks)
      : directory_((std::filesystem::temp_directory_path() / "capstan-XXXXXX").string()) {
    // A directory of its own makes the name of the file unique.
    if (directory_.size() + 6 > g_stop_file.size() || !::mkdtemp(directory_.data()))
      fail(ErrorCode::io, "cannot create a directory in `" + std::filesystem::temp_directory_path().string() +
                              "`: " + system_error_text(errno));
    const std::string stop = stop_file();
    std::copy(stop.begin(), stop.end(), g_stop_file.begin());
    try {
      status_table_ = comm::RankStatusTable::create(static_cast<int>(ranks), true);
    } catch (...) {
      remove_directory();
      throw;
    }
    removal_ = remove_after_launch(directory_, status_table_->path());
    g_slots = &status_table_->slot(0);
    g_ranks = ranks;
  }
  ~LaunchFiles() {
    g_ranks = 0;
    status_table_->unlink();
    remove_directory();
  }
  LaunchFiles(const LaunchFiles&) = delete;
  LaunchFiles& operator=(const LaunchFiles&) = delete;

  std::string stop_file() const { return directory_ + "/stop"; }
  comm::RankStatusTable& status_table() { return *status_table_; }
  // Called in the child process, for mpirun and the ranks.
  void export_to_ranks() const {
    // mpirun keeps it open.
    if (removal_ >= 0) ::fcntl(removal_, F_SETFD, 0);
    ::setenv("CAPSTAN_STOP_FILE", stop_file().c_str(), 1);
    // Open MPI leaves its session directories when a rank dies: they are removed with this directory.
    ::setenv("OMPI_MCA_orte_tmpdir_base", directory_.c_str(), 0);
    ::setenv("PRTE_MCA_prte_tmpdir_base", directory_.c_str(), 0);
    ::setenv(comm::kStatusTableVariable, status_table_->path().c_str(), 1);
  }

 private:
  void remove_directory() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  std::string directory_;
  std::unique_ptr<comm::RankStatusTable> status_table_;
  int removal_ = -1;
};

// Called in the child process: replaces it by mpirun.
[[noreturn]] void execute_mpirun(const LaunchFiles& files, const std::string& given, pid_t parent,
                                 char* const* argv, const sigset_t& signals) {
  // A group of its own: ctrl-C reaches the parent alone, which asks for a save instead of letting mpirun
  // end the ranks.
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(4);
  const int null = ::open("/dev/null", O_RDONLY);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  files.export_to_ranks();
  ::setenv("CAPSTAN_PARENT", given.c_str(), 1);
  if (g_terminal) ::setenv("CAPSTAN_PARENT_TERMINAL", "1", 1);
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGINT, &standard, nullptr);
  ::sigaction(SIGTERM, &standard, nullptr);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  ::execv(argv[0], argv);
  ::_exit(127);
}

// Returns mpirun's exit status as wait() gives it.
int run_mpirun(const Context& context, const LaunchFiles& files, std::vector<std::string> words) {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  // A signal that arrives before mpirun runs is kept until the parent waits for it.
  sigset_t stops, before;
  sigemptyset(&stops);
  sigaddset(&stops, SIGINT);
  sigaddset(&stops, SIGTERM);
  sigprocmask(SIG_BLOCK, &stops, &before);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);

  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string given = join(context.command_line, std::string(1, kWordSeparator));
  const pid_t parent = ::getpid();
  g_terminal = is_terminal(STDERR_FILENO);
  const pid_t child = ::fork();
  if (child < 0) fail(ErrorCode::io, "cannot start mpirun: " + system_error_text(errno));
  if (child == 0) execute_mpirun(files, given, parent, argv.data(), before);
  g_launcher = child;
  sigprocmask(SIG_SETMASK, &before, nullptr);

  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR) fail(ErrorCode::io, "cannot wait for mpirun: " + system_error_text(errno));
  g_launcher = 0;
  return status;
}

}  // namespace

int launch_ranks(const Context& context, int64_t ranks, bool saves_on_signal, std::string* death) {
  std::string unused;
  std::string& reason = death ? *death : unused;
  g_signals = saves_on_signal ? 0 : 1;
  if (ranks < 1 || ranks > kMaxRanks)
    fail(ErrorCode::usage, "`--nproc` takes a number of ranks from 1 to " + std::to_string(kMaxRanks));
  if (const auto launched = comm::launched_as(); !launched.source.empty()) {
    // Rank 0 reports the error.
    if (launched.rank > 0) throw CommandExit{exit_code_of(ErrorCode::usage)};
    fail(ErrorCode::usage, "`--nproc` inside a world that " + launched.source + " has launched",
         "leave `--nproc` out: this process is rank " + std::to_string(launched.rank) + " of " +
             std::to_string(launched.size));
  }
  std::vector<std::string> words = mpirun_command(context, ranks);
  LaunchFiles files(ranks);
  const int status = run_mpirun(context, files, std::move(words));

  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == 127) fail(ErrorCode::failed, "mpirun did not start");
  // mpirun exits with 1 after SIGTERM.
  if (g_signals > 1 && code != 0 && code != 75) {
    reason = "ended at once by a second signal";
    if (saves_on_signal && !context.quiet()) report_second_signal();
    return 128 + static_cast<int>(g_first_signal);
  }
  if (auto failure = files.status_table().report(); failure && !WIFSIGNALED(status)) {
    reason = failure->message();
    if (code >= 128) {
      const std::string signal = "it was ended by signal " + std::to_string(code - 128);
      failure->in(signal);
      reason += "; " + signal;
    }
    return report(*failure, context.command_line, {context.messages, context.color_err});
  }
  if (code < 128) return code;
  const std::string signal = "signal " + std::to_string(code - 128);
  reason = WIFSIGNALED(status) ? "mpirun was ended by " + signal + ", and the ranks with it"
                               : "a rank was ended by " + signal + "; mpirun has ended the others";
  print_stderr("error: " + reason + "\n");
  return exit_code_of(ErrorCode::rank_failure);
}

int run_in_world(const Context& context, double timeout, FunctionRef<int(comm::World&)> body) {
  const MessageStyle style{context.messages, context.color_err};
  const std::unique_ptr<comm::World> world =
      comm::World::join({.timeout = timeout, .report = [&](const Error& error) {
                           print_stderr(render_error(error, context.command_line, style));
                         }});
  if (world->size() == 1) return body(*world);
  try {
    return body(*world);
  } catch (...) {
    const Error error = as_error(std::current_exception());
    // Do not report errors that follow from the one already reported. The rank that has it ends the world
    // with its exit code: the launcher takes the first one.
    if (error.code() == ErrorCode::rank_failure && world->failure_reported()) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      world->abort(exit_code_of(error.code()));
    }
    const int code = report(error, context.command_line, style);
    world->abort(code);
    return code;
  }
}

}  // namespace capstan::cli
