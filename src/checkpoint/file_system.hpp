// The interface through which a save changes the disk. Production code uses real_file_system(); tests use a
// file system that fails, writes partially or loses data at the n-th operation.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

namespace capstan::checkpoint {

// Every operation throws Error (ErrorCode::io or ::not_found) when the system refuses it, without a retry.
class FileSystem {
 public:
  class File {
   public:
    // Closes the file. Without finish() it may be incomplete.
    virtual ~File() = default;
    virtual void write(std::span<const std::byte> bytes) = 0;
    // Flushes, syncs and closes the file. May be called once.
    virtual void finish() = 0;
    void write_text(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  };

  virtual ~FileSystem() = default;
  // Creates a file, or truncates an existing one.
  virtual std::unique_ptr<File> create(const std::filesystem::path& path) = 0;
  // Creates missing parents too and syncs each entry. Existing directories are no error.
  virtual void make_directories(const std::filesystem::path& path) = 0;
  virtual void sync_directory(const std::filesystem::path& path) = 0;
  // Renames a file or directory. `to` must not exist.
  virtual void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  // Swaps two directories atomically; false where the file system does not support it.
  virtual bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) = 0;
  virtual void remove_file(const std::filesystem::path& path) = 0;
  // Removes an empty directory.
  virtual void remove_directory(const std::filesystem::path& path) = 0;

  // Removes a file, or a directory with its contents, by one operation per entry. Follows no links.
  void remove_tree(const std::filesystem::path& path);
};

FileSystem& real_file_system();

}  // namespace capstan::checkpoint
