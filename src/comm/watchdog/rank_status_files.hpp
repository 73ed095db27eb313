// Rank status across hosts, through files in a directory that all hosts can access. The first rank of each
// host writes one line per rank of its host and reads the other hosts' files.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

class RankStatusFiles {
 public:
  // hosts: for every host the world rank of its first rank, which names its file. `mine` is one of them.
  RankStatusFiles(std::filesystem::path directory, int mine, std::vector<int> hosts);

  // Ignores file-system errors: the other hosts report a host that cannot write as silent.
  void write(const std::vector<RankStatus>& statuses) noexcept;
  // The ranks of the other hosts. A rank whose heartbeat has not changed for `timeout` seconds of the local
  // clock is `gone`. Omits ranks that have not written yet.
  std::vector<RankStatus> read(double timeout);
  // True for the first caller of all ranks.
  bool claim_report();

  // Removes the files of an earlier start. Call it on one rank before the others construct a RankStatusFiles.
  static void clear(const std::filesystem::path& directory);

 private:
  struct LastHeartbeat {
    int64_t heartbeat = -1, seen_ns = 0;
  };
  std::filesystem::path path_of(int host) const;
  std::filesystem::path directory_;
  int mine_;
  std::vector<int> hosts_;
  // Last heartbeat of each rank, by world rank.
  std::map<int, LastHeartbeat> heartbeats_;
};

// One line of such a file, without the newline; nullopt for a malformed line.
std::string format_line(const RankStatus& status);
std::optional<RankStatus> parse_line(std::string_view line);

}  // namespace capstan::comm
