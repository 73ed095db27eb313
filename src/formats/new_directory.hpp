// Creates a directory atomically: writes it under a temporary name next to the target, syncs and renames it.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/file_system.hpp"

namespace capstan::formats {

class NewDirectory {
 public:
  // Refuses a target that exists or whose parent does not: require_new().
  explicit NewDirectory(const std::filesystem::path& target);
  // Removes the temporary directory.
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  const std::filesystem::path& path() const { return temporary_; }
  checkpoint::FileSystem& files() { return files_; }
  void write(const std::string& name, const std::string& text);
  // Publishes `made`, which is path() or a directory in it, under the target's name.
  void appear(const std::filesystem::path& made);

 private:
  checkpoint::FileSystem& files_;
  std::filesystem::path target_, temporary_;
  bool done_ = false;
};

// Refuses a target that exists or whose parent does not: ErrorCode::usage, ::not_found.
void require_new(const std::filesystem::path& target);

}  // namespace capstan::formats
