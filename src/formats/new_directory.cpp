#include "formats/new_directory.hpp"

#include <unistd.h>

#include "base/error.hpp"
#include "base/missing.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;

void require_new(const fs::path& target) {
  std::error_code error;
  if (fs::symlink_status(target, error).type() != fs::file_type::not_found)
    fail(ErrorCode::usage, "`" + target.string() + "` exists already",
         "choose another name, or remove it first");
  const fs::path parent = fs::absolute(target).lexically_normal().parent_path();
  if (!fs::is_directory(parent, error))
    fail_not_found("directory", parent.string(),
                   "the directory in which `" + target.filename().string() + "` is written has to exist");
}

NewDirectory::NewDirectory(const fs::path& target) : files_(checkpoint::real_file_system()) {
  target_ = fs::absolute(target).lexically_normal();
  if (!target_.has_filename()) target_ = target_.parent_path();
  require_new(target_);
  temporary_ = target_;
  temporary_ += ".tmp-" + std::to_string(::getpid());
  files_.make_directories(temporary_);
}

NewDirectory::~NewDirectory() {
  std::error_code error;
  if (done_ || !fs::exists(temporary_, error)) return;
  try {
    files_.remove_tree(temporary_);
  } catch (const Error&) {
    // A leftover temporary directory is harmless.
  }
}

void NewDirectory::write(const std::string& name, const std::string& text) {
  const auto file = files_.create(temporary_ / name);
  file->write_text(text);
  file->finish();
}

void NewDirectory::appear(const fs::path& made) {
  files_.sync_directory(made);
  files_.rename_new(made, target_);
  done_ = made == temporary_;
  files_.sync_directory(target_.parent_path());
}

}  // namespace capstan::formats
