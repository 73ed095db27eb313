// Files: read-only maps, reads of complete files with a limit, and writes that happen completely or not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace capstan {

// Throws ErrorCode::not_found (missing), ::format (a directory, a device, larger than `limit`) or ::io.
std::string read_file(const std::filesystem::path& path, uint64_t limit = uint64_t{1} << 32);

// A read-only map of a regular file. Empty files give an empty span.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }
  void advise_sequential() const;
  // Drops the pages that hold `part` from this process's resident memory; they are mapped again when they are
  // read.
  void release(std::span<const std::byte> part) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A file being written: buffered, errors checked at each step; finish() flushes, fsyncs and closes. Destroyed
// without finish() it closes and leaves what was written (the caller writes to a temporary path).
class FileWriter {
 public:
  explicit FileWriter(const std::filesystem::path& path, size_t buffer_bytes = 1 << 20);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  void flush();
  void finish(bool sync = true);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::unique_ptr<std::byte[]> buffer_;
  size_t capacity_, used_ = 0;
};

// Writes PATH.tmp.<pid>, fsyncs it, renames it over PATH and fsyncs the directory.
void write_file_durably(const std::filesystem::path& path, std::string_view content);
void sync_directory(const std::filesystem::path& path);
// rename(2) that refuses to replace anything, then fsync of the parent of `to`.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);

std::string system_error_text(int error_number);

}  // namespace capstan
