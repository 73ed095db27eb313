// The failure board across hosts: files in a directory that all of them see (of the run). The first rank of each host writes
// what its host's ranks post, one line each, and reads what the other hosts wrote.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

class RankStatusFiles {
 public:
  // hosts: of every host the world rank of its first rank, which names its file; mine is one of them.
  RankStatusFiles(std::filesystem::path directory, int mine, std::vector<int> hosts);

  // Errors of the file system are swallowed: a host that cannot write looks silent to the others, and is reported so.
  void write(const std::vector<RankStatus>& statuses) noexcept;
  // The ranks of the other hosts. One whose heartbeat has not changed for `timeout` seconds of our clock is `gone`. Ranks that
  // have not written yet are missing.
  std::vector<RankStatus> read(double timeout);
  // True for the first to ask in the whole world.
  bool claim();

  // Removes what an earlier start left; by one rank, before the others construct theirs.
  static void clear(const std::filesystem::path& directory);

 private:
  struct Sign {  // of life
    int64_t heartbeat = -1, seen_ns = 0;
  };
  std::filesystem::path file_of(int host) const;
  std::filesystem::path directory_;
  int mine_;
  std::vector<int> hosts_;
  std::map<int, Sign> signs_;  // by world rank
};

// One line of such a file, without the newline; nullopt for a line that is none.
std::string line_of(const RankStatus& status);
std::optional<RankStatus> parse_line(std::string_view line);

}  // namespace capstan::comm
