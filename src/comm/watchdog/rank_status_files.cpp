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
constexpr uint64_t kLargest = 16 << 20;  // bytes of one host's file
constexpr size_t kNumbers = 11, kTexts = 4;
}  // namespace

// Tabs between eleven numbers, three texts and the groups ("name:first:sequence", separated by spaces).
std::string line_of(const Post& post) {
  const std::array<int64_t, kNumbers> numbers{post.rank,
                                              post.pid,
                                              static_cast<int64_t>(post.doing),
                                              static_cast<int64_t>(post.seconds * 1e3),
                                              post.heartbeat,
                                              post.step,
                                              static_cast<int64_t>(post.call),
                                              post.first,
                                              post.peer,
                                              post.sequence,
                                              post.bytes};
  std::string line;
  for (const int64_t number : numbers) line += std::to_string(number) + "\t";
  line += post.host + "\t" + post.phase + "\t" + post.group + "\t";
  for (const Post::Group& group : post.groups)
    line += group.name + ":" + std::to_string(group.first) + ":" + std::to_string(group.sequence) + " ";
  return line;
}

std::optional<Post> parse_line(std::string_view line) {
  const auto fields = split(line, '\t');
  if (fields.size() != kNumbers + kTexts) return std::nullopt;
  std::array<int64_t, kNumbers> n{};
  for (size_t i = 0; i < kNumbers; ++i) {
    const auto value = parse_int(fields[i]);
    if (!value) return std::nullopt;
    n[i] = *value;
  }
  constexpr int64_t kMostRanks = 1 << 24;
  if (n[0] < 0 || n[0] > kMostRanks || n[2] < 0 || n[2] > static_cast<int64_t>(Doing::ended) || n[6] < 0 ||
      n[6] > static_cast<int64_t>(Call::finalize))
    return std::nullopt;
  Post post;
  post.rank = static_cast<int>(n[0]);
  post.pid = static_cast<int>(n[1]);
  post.doing = static_cast<Doing>(n[2]);
  post.seconds = 1e-3 * static_cast<double>(n[3]);
  post.heartbeat = n[4];
  post.step = n[5];
  post.call = static_cast<Call>(n[6]);
  post.first = static_cast<int>(n[7]);
  post.peer = static_cast<int>(n[8]);
  post.sequence = n[9];
  post.bytes = n[10];
  post.host = fields[kNumbers];
  post.phase = fields[kNumbers + 1];
  post.group = fields[kNumbers + 2];
  for (const std::string_view group : split(fields[kNumbers + 3], ' ')) {
    const auto parts = split(group, ':');
    if (parts.size() != 3) continue;
    const auto first = parse_int(parts[1]), sequence = parse_int(parts[2]);
    if (first && sequence)
      post.groups.push_back({std::string(parts[0]), static_cast<int>(*first), *sequence});
  }
  return post;
}

SharedPosts::SharedPosts(std::filesystem::path directory, int mine, std::vector<int> hosts)
    : directory_(std::move(directory)), mine_(mine), hosts_(std::move(hosts)) {}

std::filesystem::path SharedPosts::file_of(int host) const {
  return directory_ / ("host-" + std::to_string(host));
}

void SharedPosts::clear(const std::filesystem::path& directory) {
  std::error_code code;
  std::filesystem::remove_all(directory, code);
  if (!code) std::filesystem::create_directories(directory, code);
  if (code)
    fail(ErrorCode::io,
         "cannot make a place for the ranks' posts `" + directory.string() + "`: " + code.message());
}

void SharedPosts::write(const std::vector<Post>& posts) noexcept {
  try {
    std::string text;
    for (const Post& post : posts) text += line_of(post) + "\n";
    // Renamed into place: a reader sees the whole of it.
    const std::filesystem::path next = file_of(mine_).string() + ".next";
    FileWriter file(next);
    file.write(text);
    file.finish(false);
    std::filesystem::rename(next, file_of(mine_));
  } catch (const std::exception&) {
  }
}

std::vector<Post> SharedPosts::read(double timeout) {
  std::vector<Post> posts;
  for (const int host : hosts_) {
    if (host == mine_) continue;
    std::string text;
    try {
      text = read_file(file_of(host), kLargest);
    } catch (const Error&) {
      continue;
    }
    const int64_t now = monotonic_ns();
    for (const std::string_view line : split(text, '\n')) {
      auto post = parse_line(line);
      if (!post) continue;
      Sign& sign = signs_[post->rank];
      if (sign.heartbeat != post->heartbeat) sign = {post->heartbeat, now};
      const double since = 1e-9 * static_cast<double>(now - sign.seen_ns);
      post->seconds += since;
      post->remote = true;
      post->gone = since >= timeout;
      posts.push_back(std::move(*post));
    }
  }
  return posts;
}

bool SharedPosts::claim() {
  const int fd = ::open((directory_ / kReport).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return errno != EEXIST;  // where nothing can be written, twice is better than never
  ::close(fd);
  return true;
}

}  // namespace capstan::comm
