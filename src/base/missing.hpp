// Files and directories that are named and not there: one wording, with the names that are near.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace capstan {

// "not found: FIELD = NAME"; without a field "not found: NAME".
std::string not_found_text(std::string_view field, std::string_view name);

// What a name stands for, which decides the names that are near.
enum class NamedThing { file, dataset_prefix };  // a prefix: PREFIX.bin and PREFIX.idx

// Names that exist and are near `name`, best first, three at most, written as `name` is: relative to the
// directory that `name` is relative to. `resolved` is the path that `name` stands for; empty: `name` itself.
std::vector<std::string> near_paths(const std::string& name, const std::filesystem::path& resolved = {},
                                    NamedThing thing = NamedThing::file);
// "did you mean `a` or `b`?"; empty without names.
std::string near_paths_help(const std::vector<std::string>& names);

// How to get what `name` ("org/name", or an absolute path of which it is the end) calls on the Hugging Face
// Hub; empty where it does not look like a name of the Hub, or where a directory `org` exists.
std::string download_help(const std::filesystem::path& name);

// ErrorCode::not_found with not_found_text() and, as help, near names, else how to download it, else
// `otherwise`.
[[noreturn]] void fail_not_found(std::string_view field, const std::string& name, std::string otherwise = {});

// ErrorCode::format where `content` is what incomplete downloads leave in a file's place: a Git LFS pointer
// or an HTML page.
void refuse_placeholder(std::string_view content, const std::string& file);
// The pointer alone: for text, which may be HTML.
void refuse_lfs_pointer(std::string_view content, const std::string& file);
void refuse_placeholder(std::span<const std::byte> content, const std::string& file);

}  // namespace capstan
