// The seam through which a save changes the disk. Production code uses real_file_system(); tests put a file
// system underneath that fails, tears or forgets at the n-th operation.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

namespace capstan::checkpoint {

// Every operation throws Error (ErrorCode::io or ::not_found) when the system refuses it; nothing is retried.
class FileSystem {
 public:
  class File {
   public:
    virtual ~File() = default;  // closes; what was not finished may be there in part
    virtual void write(std::span<const std::byte> bytes) = 0;
    virtual void finish() = 0;  // flush, fsync, close; at most once
    void write_text(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  };

  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> create(const std::filesystem::path& path) = 0;  // an existing file is emptied
  // Parents too, each entry synced; there already: fine.
  virtual void make_directories(const std::filesystem::path& path) = 0;
  virtual void sync_directory(const std::filesystem::path& path) = 0;
  virtual void rename_new(const std::filesystem::path& from,
                          const std::filesystem::path& to) = 0;  // `to` must not exist
  // Swaps two directories in one step; false where the file system cannot.
  virtual bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) = 0;
  virtual void remove_file(const std::filesystem::path& path) = 0;
  virtual void remove_directory(const std::filesystem::path& path) = 0;  // must be empty

  // Removes a file or a directory with all that it holds, one operation for each entry. Follows no links.
  void remove_tree(const std::filesystem::path& path);
};

FileSystem& real_file_system();

}  // namespace capstan::checkpoint
