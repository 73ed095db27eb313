#include "checkpoint/file_system.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/file.hpp"

namespace capstan::checkpoint {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail_io(const char* action, const fs::path& path, int error_number) {
  fail(error_number == ENOENT ? ErrorCode::not_found : ErrorCode::io,
       std::string("cannot ") + action + " `" + path.string() + "`: " + system_error_text(error_number));
}

class RealFile final : public FileSystem::File {
 public:
  explicit RealFile(const fs::path& path) : writer_(path) {}
  void write(std::span<const std::byte> bytes) override { writer_.write(bytes); }
  void finish() override { writer_.finish(); }

 private:
  FileWriter writer_;
};

class RealFileSystem final : public FileSystem {
 public:
  std::unique_ptr<File> create(const fs::path& path) override { return std::make_unique<RealFile>(path); }
  void make_directories(const fs::path& path) override {
    std::error_code error;
    std::vector<fs::path> missing;
    for (fs::path at = path; !at.empty() && !fs::exists(at, error); at = at.parent_path())
      missing.push_back(at);
    fs::create_directories(path, error);
    if (error) fail_io("create directory", path, error.value());
    for (const auto& made : missing) capstan::sync_directory(made.parent_path());
  }
  void sync_directory(const fs::path& path) override { capstan::sync_directory(path); }
  void rename_new(const fs::path& from, const fs::path& to) override {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
    if (errno != EINVAL && errno != ENOSYS) fail_io("rename", from, errno);
    // Some network file systems lack the flag. A plain rename cannot replace a directory that is not empty.
    std::error_code error;
    if (fs::symlink_status(to, error).type() != fs::file_type::not_found) fail_io("rename", from, EEXIST);
    if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename", from, errno);
  }
  bool exchange(const fs::path& a, const fs::path& b) override {
    if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS) return false;
    fail_io("exchange", a, errno);
  }
  void remove_file(const fs::path& path) override {
    if (::unlink(path.c_str()) != 0) fail_io("remove", path, errno);
  }
  void remove_directory(const fs::path& path) override {
    if (::rmdir(path.c_str()) != 0) fail_io("remove directory", path, errno);
  }
};

}  // namespace

void FileSystem::remove_tree(const fs::path& path) {
  std::error_code error;
  if (fs::symlink_status(path, error).type() != fs::file_type::directory) {
    remove_file(path);
    return;
  }
  std::vector<fs::path> entries;
  fs::directory_iterator directory(path, error);
  if (error) fail_io("read directory", path, error.value());
  for (const auto& entry : directory) entries.push_back(entry.path());
  std::sort(entries.begin(), entries.end());
  for (const auto& entry : entries) remove_tree(entry);
  remove_directory(path);
}

FileSystem& real_file_system() {
  static RealFileSystem instance;
  return instance;
}

}  // namespace capstan::checkpoint
