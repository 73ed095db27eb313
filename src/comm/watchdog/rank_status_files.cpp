#include "comm/watchdog/rank_status_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan::comm {

namespace {
constexpr std::string_view kReport = "report";
constexpr uint64_t kMaxStatusFileBytes = 16 << 20;
constexpr size_t kNumbers = 11, kTexts = 4;
// Numbers of a group, between its name and its text.
constexpr size_t kGroupNumbers = 6;
}  // namespace

// Tabs between eleven numbers, three texts and the groups, which spaces separate:
// "name:first:sequence:started:begun:done:milliseconds:text", the text with `+` for its spaces.
std::string format_line(const RankStatus& status) {
  const std::array<int64_t, kNumbers> numbers{status.rank,
                                              status.pid,
                                              static_cast<int64_t>(status.state),
                                              static_cast<int64_t>(status.seconds * 1e3),
                                              status.heartbeat,
                                              status.step,
                                              static_cast<int64_t>(status.call),
                                              status.first,
                                              status.peer,
                                              status.sequence,
                                              status.bytes};
  std::string line;
  for (const int64_t number : numbers) line += std::to_string(number) + "\t";
  line += status.host + "\t" + status.phase + "\t" + status.group + "\t";
  for (const RankStatus::Group& group : status.groups) {
    line += group.name;
    for (const int64_t number : {int64_t{group.first}, group.sequence, group.started, group.begun, group.done,
                                 static_cast<int64_t>(group.seconds * 1e3)})
      line += ":" + std::to_string(number);
    std::string text = group.text;
    std::replace(text.begin(), text.end(), ' ', '+');
    line += ":" + text + " ";
  }
  return line;
}

static std::optional<RankStatus::Group> parse_group(std::string_view text) {
  const auto parts = split(text, ':');
  if (parts.size() != kGroupNumbers + 2) return std::nullopt;
  std::array<int64_t, kGroupNumbers> n{};
  for (size_t i = 0; i < kGroupNumbers; ++i) {
    const auto value = parse_int(parts[i + 1]);
    if (!value) return std::nullopt;
    n[i] = *value;
  }
  RankStatus::Group group{std::string(parts[0]), static_cast<int>(n[0]), n[1]};
  group.started = n[2], group.begun = n[3], group.done = n[4];
  group.seconds = 1e-3 * static_cast<double>(n[5]);
  group.text = parts[kGroupNumbers + 1];
  std::replace(group.text.begin(), group.text.end(), '+', ' ');
  return group;
}

std::optional<RankStatus> parse_line(std::string_view line) {
  const auto fields = split(line, '\t');
  if (fields.size() != kNumbers + kTexts) return std::nullopt;
  std::array<int64_t, kNumbers> n{};
  for (size_t i = 0; i < kNumbers; ++i) {
    const auto value = parse_int(fields[i]);
    if (!value) return std::nullopt;
    n[i] = *value;
  }
  constexpr int64_t kMaxRank = 1 << 24;
  if (n[0] < 0 || n[0] > kMaxRank || n[2] < 0 || n[2] > static_cast<int64_t>(RankState::ended) || n[6] < 0 ||
      n[6] > static_cast<int64_t>(Call::finalize))
    return std::nullopt;
  RankStatus status;
  status.rank = static_cast<int>(n[0]);
  status.pid = static_cast<int>(n[1]);
  status.state = static_cast<RankState>(n[2]);
  status.seconds = 1e-3 * static_cast<double>(n[3]);
  status.heartbeat = n[4];
  status.step = n[5];
  status.call = static_cast<Call>(n[6]);
  status.first = static_cast<int>(n[7]);
  status.peer = static_cast<int>(n[8]);
  status.sequence = n[9];
  status.bytes = n[10];
  status.host = fields[kNumbers];
  status.phase = fields[kNumbers + 1];
  status.group = fields[kNumbers + 2];
  for (const std::string_view group : split(fields[kNumbers + 3], ' '))
    if (auto parsed = parse_group(group)) status.groups.push_back(std::move(*parsed));
  return status;
}

RankStatusFiles::RankStatusFiles(std::filesystem::path directory, int mine, std::vector<int> hosts)
    : directory_(std::move(directory)), mine_(mine), hosts_(std::move(hosts)) {}

std::filesystem::path RankStatusFiles::path_of(int host) const {
  return directory_ / ("host-" + std::to_string(host));
}

void RankStatusFiles::clear(const std::filesystem::path& directory) {
  std::error_code code;
  std::filesystem::remove_all(directory, code);
  if (!code) std::filesystem::create_directories(directory, code);
  if (code)
    fail(ErrorCode::io,
         "cannot create the directory of the rank status `" + directory.string() + "`: " + code.message());
}

void RankStatusFiles::write(const std::vector<RankStatus>& statuses) noexcept {
  try {
    std::string text;
    for (const RankStatus& status : statuses) text += format_line(status) + "\n";
    // Renamed into place, so that a reader sees the complete file.
    const std::filesystem::path next = path_of(mine_).string() + ".next";
    FileWriter file(next);
    file.write(text);
    file.finish(false);
    std::filesystem::rename(next, path_of(mine_));
  } catch (const std::exception&) {
  }
}

std::vector<RankStatus> RankStatusFiles::read(double timeout) {
  std::vector<RankStatus> statuses;
  for (const int host : hosts_) {
    if (host == mine_) continue;
    std::string text;
    try {
      text = read_file(path_of(host), kMaxStatusFileBytes);
    } catch (const Error&) {
      continue;
    }
    const int64_t now = monotonic_ns();
    for (const std::string_view line : split(text, '\n')) {
      auto status = parse_line(line);
      if (!status) continue;
      LastHeartbeat& last = heartbeats_[status->rank];
      if (last.heartbeat != status->heartbeat) last = {status->heartbeat, now};
      const double since = 1e-9 * static_cast<double>(now - last.seen_ns);
      status->seconds += since;
      for (RankStatus::Group& group : status->groups) group.seconds += since;
      status->remote = true;
      status->gone = since >= timeout;
      statuses.push_back(std::move(*status));
    }
  }
  return statuses;
}

bool RankStatusFiles::claim_report() {
  const int fd = ::open((directory_ / kReport).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  // An unwritable directory: report twice rather than never.
  if (fd < 0) return errno != EEXIST;
  ::close(fd);
  return true;
}

}  // namespace capstan::comm
