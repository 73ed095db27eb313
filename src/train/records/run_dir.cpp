#include "train/records/run_dir.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/file_system.hpp"
#include "train/records/run_list.hpp"

namespace capstan::records {

namespace fs = std::filesystem;

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> buffer;
  return {buffer.data(), std::strftime(buffer.data(), buffer.size(), "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

static std::string new_id() {
  uint64_t number = 0;
  CAPSTAN_ASSERT(::getrandom(&number, sizeof number, 0) == static_cast<ssize_t>(sizeof number),
                 "random bytes");
  return hex(number);
}

FileLock::FileLock(const fs::path& directory, std::string_view what) {
  const fs::path path = directory / "lock";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) fail(ErrorCode::io, "cannot open `" + path.string() + "`: " + system_error_text(errno));
  // A listing holds the lock in shared mode for a moment, so a failed attempt is repeated a few times.
  for (int attempt = 0; ::flock(fd, LOCK_EX | LOCK_NB) != 0; ++attempt) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EWOULDBLOCK && attempt < 10) {
      ::usleep(10'000);
      continue;
    }
    std::array<char, 200> holder{};
    const ssize_t got = ::pread(fd, holder.data(), holder.size(), 0);
    ::close(fd);
    if (error != EWOULDBLOCK)
      fail(ErrorCode::io, "cannot lock `" + path.string() + "`: " + system_error_text(error));
    const auto who = trim({holder.data(), static_cast<size_t>(got > 0 ? got : 0)});
    fail(ErrorCode::failed,
         std::string(what) + " `" + directory.string() + "` is in use by " +
             (who.empty() ? "another process" : std::string(who)),
         "wait for it to end, or choose another directory");
  }
  const std::string who = "process " + std::to_string(::getpid()) + " on " + host_name() + "\n";
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, who.data(), who.size(), 0) < 0) {
    // The lock holds even if its file does not name the owner, who is named in errors only.
  }
  fd_ = fd;
}
FileLock::~FileLock() {
  if (fd_ >= 0) ::close(fd_);
}
FileLock::FileLock(FileLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

// The file that write_file_durably leaves when its process is killed: "run.json.tmp.1234".
static bool is_temporary(const fs::path& path) {
  const std::string name = path.filename().string();
  const size_t at = name.rfind(".tmp.");
  return at != std::string::npos && at + 5 < name.size() &&
         name.find_first_not_of("0123456789", at + 5) == std::string::npos;
}

void require_run_or_empty(const fs::path& path) {
  std::error_code error;
  if (is_run(path) || !fs::exists(path, error)) return;
  if (!fs::is_directory(path, error))
    fail(ErrorCode::failed, "`" + path.string() + "` is a file, not a run directory", "give {other_run_dir}");
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.path().filename() != "lock" && !is_temporary(entry.path()))
      fail(ErrorCode::failed,
           "`" + path.string() + "` exists and is not a run directory (it has no " + std::string(kRunFile) +
               ")",
           "give {other_run_dir}");
}

void record_killed(const fs::path& run, std::string_view since, std::string_view reason) {
  if (!is_run(run)) return;
  const FileLock lock(run, "run");
  RunFile file = read_run_file(run);
  if (file.state != "running" || !file.reason.empty() || file.started < since) return;
  file.reason = reason;
  file.ended = utc_now();
  write_file_durably(run / kRunFile, run_file_text(file));
}

RunDirectory::RunDirectory(const fs::path& path, bool resume) : path_(path) {
  std::error_code error;
  const bool exists = fs::exists(path / kRunFile, error);
  if (exists && !resume) {
    const RunSummary run = summarize(path);
    fail(ErrorCode::failed,
         "run `" + path.string() + "` exists already (" + std::string(name_of(run.state)) +
             (run.step ? " at step " + std::to_string(*run.step) : std::string()) + ")",
         "{resume}, or give {other_run_dir}");
  }
  require_run_or_empty(path);
  checkpoint::real_file_system().make_directories(path);
  lock_.emplace(path, "run");
  // Looked at again under the lock: another process may have been faster.
  resumed_ = fs::exists(path / kRunFile, error);
  if (resumed_ && !resume)
    fail(ErrorCode::failed, "run `" + path.string() + "` exists already",
         "{resume}, or give {other_run_dir}");
  for (const auto& entry : fs::directory_iterator(path, error))
    if (is_temporary(entry.path())) fs::remove(entry.path(), error);
  if (resumed_) {
    file_ = read_run_file(path);
    // The state is stale, because the lock is free.
    killed_ = file_.state == "running";
  } else {
    file_.id = new_id();
    file_.created = utc_now();
  }
}

fs::path RunDirectory::checkpoints() const {
  return path_ / (file_.checkpoints.empty() ? "checkpoints" : file_.checkpoints);
}

// Keeps what `name` held before under a number when the new text differs.
static void replace_text(const fs::path& directory, const std::string& stem, const std::string& content) {
  const fs::path path = directory / (stem + ".yaml");
  std::error_code error;
  if (fs::exists(path, error)) {
    const std::string before = read_file(path, 64 << 20);
    if (before == content) return;
    int n = 1;
    while (fs::exists(directory / (stem + "." + std::to_string(n) + ".yaml"), error)) ++n;
    write_file_durably(directory / (stem + "." + std::to_string(n) + ".yaml"), before);
  }
  write_file_durably(path, content);
}

void RunDirectory::begin(const RunRecords& records) {
  // run.json first: it is what makes the directory a run that can be resumed, whatever happens to the rest.
  file_.recipe = records.recipe_name;
  file_.checkpoints = records.checkpoints;
  file_.layout = records.layout;
  file_.data = records.data;
  file_.ranks = records.ranks;
  file_.seed = records.seed;
  file_.steps = records.steps;
  file_.started = utc_now();
  file_.ended.clear();
  file_.reason.clear();
  file_.state = "running";
  ++file_.starts;
  save();
  replace_text(path_, "recipe.given", records.recipe_given);
  replace_text(path_, "recipe", records.recipe);
  std::error_code error;
  const fs::path command = path_ / "command.txt";
  write_file_durably(command, (fs::exists(command, error) ? read_file(command, 64 << 20) : std::string()) +
                                  records.command + "\n");
  write_file_durably(path_ / "version.json", records.version);
  checkpoint::real_file_system().make_directories(checkpoints());
}

void RunDirectory::end(RunEnd how, std::string_view reason) {
  file_.state = how == RunEnd::finished ? "finished" : how == RunEnd::stopped ? "stopped" : "failed";
  file_.reason = reason;
  file_.ended = utc_now();
  save();
}

void RunDirectory::save() const {
  write_file_durably(path_ / kRunFile, run_file_text(file_));
}

}  // namespace capstan::records
