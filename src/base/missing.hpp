// Messages for files and directories that do not exist: one wording, with similar names.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace capstan {

// Returns "not found: WHAT = NAME", on one line. what: the field that names it, or what it is: "file",
// "sweep directory".
std::string not_found_text(std::string_view what, std::string_view name);

// The kind of thing that a name stands for, which decides the names that are near. dataset_prefix: PREFIX.bin
// and PREFIX.idx.
enum class MissingKind { file, dataset_prefix };

// Returns existing names that are similar to `name`, best first and three at most. They are relative to the
// same directory as `name`. `resolved` is the path that `name` stands for. Empty: `name` itself.
std::vector<std::string> near_paths(const std::string& name, const std::filesystem::path& resolved = {},
                                    MissingKind kind = MissingKind::file);
// Returns existing names that are similar to the name of a run or a sweep: beside it, and in the directory
// where these are made. Only paths that `accepts` returns true for are named.
std::vector<std::string> near_runs(const std::string& name, const std::string& directory,
                                   bool (*accepts)(const std::filesystem::path&));
// Returns "did you mean `a` or `b`?", or an empty text without names.
std::string near_paths_help(const std::vector<std::string>& names);

enum class HubKind { model, dataset };
// Explains how to download the model or data set `name` from the Hugging Face Hub: "org/name",
// "org/name@rev", the address of its page, or an absolute path that ends so. Empty if it does not look
// like a name on the Hub, or if a directory `org` exists.
std::string download_help(const std::filesystem::path& name, HubKind kind = HubKind::model);

// Throws ErrorCode::not_found with not_found_text(). The help gives similar names, or how to download it, or
// `otherwise`.
[[noreturn]] void fail_not_found(std::string_view what, const std::string& name, std::string otherwise = {},
                                 HubKind kind = HubKind::model);

// Throws ErrorCode::format if `content` is what an incomplete download leaves in place of a file: a Git LFS
// pointer or an HTML page.
void refuse_placeholder(std::string_view content, const std::string& file);
// Refuses only a Git LFS pointer: for text, which may be HTML (HtmlPages).
void refuse_lfs_pointer(std::string_view content, const std::string& file);
void refuse_placeholder(std::span<const std::byte> content, const std::string& file);

// The text files that begin as an HTML page. A failed download may leave such a file.
class HtmlPages {
 public:
  // Looks at the beginning of a file.
  void look(std::string_view content, const std::string& file);
  // Names the pages whose names do not end in .html or .htm, before .gz or .zst. Empty: there are none.
  std::string warning() const;
  // Names the others, which are meant to be HTML.
  std::string note() const;

 private:
  struct Group {
    size_t count = 0;
    std::string first;
    std::string text(const char* one, const char* several) const;
  };
  Group unexpected_, expected_;
};

}  // namespace capstan
