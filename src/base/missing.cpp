#include "base/missing.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace capstan {

namespace fs = std::filesystem;

std::string not_found_text(std::string_view field, std::string_view name) {
  std::string text = "not found: ";
  if (!field.empty()) text += std::string(field) + " = ";
  return text + std::string(name);
}

namespace {

constexpr size_t kMostEntries = 20000;  // of a directory; further ones are not compared

std::vector<std::string> entry_names(const fs::path& directory, NamedThing thing) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory.empty() ? fs::path(".") : directory, error), end;
       !error && it != end && names.size() < kMostEntries; it.increment(error)) {
    const fs::path file = it->path().filename();
    std::error_code unknown;
    if (thing == NamedThing::file || it->is_directory(unknown))
      names.push_back(file.string());
    else if (file.extension() == ".idx" &&
             fs::exists(fs::path(it->path()).replace_extension(".bin"), unknown))
      names.push_back(file.stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool is_hub_word(const std::string& word) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return !word.empty() && word.size() <= 96 && word[0] != '.' &&
         std::all_of(word.begin(), word.end(), allowed);
}

}  // namespace

std::vector<std::string> near_paths(const std::string& name, const fs::path& resolved, NamedThing thing) {
  const fs::path path = (resolved.empty() ? fs::path(name) : resolved).lexically_normal();
  std::error_code unknown;
  // The first part of the path that is not there.
  fs::path directory, rest;
  std::string missing;
  for (const fs::path& part : path) {
    if (!missing.empty()) {
      rest /= part;
      continue;
    }
    const fs::path next = directory / part;
    if (fs::is_directory(next, unknown))
      directory = next;
    else
      missing = part.string();
  }
  if (missing.empty() || missing.size() > 255) return {};
  // The text that was prepared, or one of the two files, in place of the prefix.
  if (thing == NamedThing::dataset_prefix && rest.empty() && fs::exists(directory / missing, unknown))
    missing = fs::path(missing).stem().string();
  const auto candidates = entry_names(directory, rest.empty() ? thing : NamedThing::file);
  std::vector<std::string> result, matches = near_matches(missing, candidates);
  // `a` of `a_text_document`: too short to be near it by its letters.
  if (thing == NamedThing::dataset_prefix && rest.empty() && matches.empty())
    for (const std::string& candidate : candidates)
      if (candidate.starts_with(missing + "_") && matches.size() < 3) matches.push_back(candidate);
  for (const std::string& near : matches) {
    if (near == missing && thing == NamedThing::file) continue;
    fs::path found = directory / near;
    if (!rest.empty()) {
      if (!fs::is_directory(found, unknown)) continue;
      if (fs::exists(found / rest, unknown)) found /= rest;
    }
    // As the user wrote it: what `resolved` has before `name` is left out.
    std::string text = found.string();
    const std::string full_path = path.string(), written = fs::path(name).lexically_normal().string();
    if (full_path.ends_with(written) &&
        text.starts_with(full_path.substr(0, full_path.size() - written.size())))
      text.erase(0, full_path.size() - written.size());
    result.push_back(std::move(text));
  }
  return result;
}

std::string near_paths_help(const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string text = "did you mean ";
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "`" : i + 1 == names.size() ? " or `" : ", `") + names[i] + "`";
  return text + "?";
}

std::string download_help(const fs::path& name) {
  const fs::path path = name.lexically_normal();
  const std::string model = path.filename().string(), owner = path.parent_path().filename().string();
  std::error_code unknown;
  if (!is_hub_word(model) || !is_hub_word(owner) || fs::exists(path.parent_path(), unknown)) return {};
  const fs::path place = path.parent_path().parent_path();
  if (path.is_absolute() ? !fs::is_directory(place, unknown) : !place.empty()) return {};
  const std::string start =
      "nothing is downloaded by itself; a model of the Hugging Face Hub comes with: hf download ";
  // `models/NAME` is where a user keeps models, not an organization of the Hub.
  if (owner == "models") return start + "ORG/" + model + " --local-dir models/" + model;
  return start + owner + "/" + model + " --local-dir " + model + ", then hf:" + model;
}

void fail_not_found(std::string_view field, const std::string& name, std::string otherwise) {
  const size_t colon = name.find(':');
  const std::string_view scheme = colon != std::string::npos && colon > 1 && name.find('/') > colon
                                      ? std::string_view(name).substr(0, colon + 1)
                                      : std::string_view();
  const std::string path = name.substr(scheme.size());
  auto near = near_paths(path);
  for (std::string& one : near) one.insert(0, scheme);
  std::string help = near_paths_help(near);
  if (help.empty() && scheme == "hf:") help = download_help(path);
  fail(ErrorCode::not_found, not_found_text(field, name), help.empty() ? std::move(otherwise) : help);
}

void refuse_placeholder(std::span<const std::byte> content, const std::string& file) {
  refuse_placeholder(std::string_view(reinterpret_cast<const char*>(content.data()), content.size()), file);
}

static std::string_view beginning_of(std::string_view content) {
  content = trim(content.substr(0, 512));
  return content.starts_with("\xEF\xBB\xBF") ? trim(content.substr(3)) : content;
}

void refuse_lfs_pointer(std::string_view content, const std::string& file) {
  if (beginning_of(content).starts_with("version https://git-lfs.github.com/spec/"))
    fail(ErrorCode::format, "`" + file + "` is a Git LFS pointer: the file itself has not been downloaded",
         "in its repository: git lfs pull; or hf download ORG/NAME --local-dir DIR");
}

void refuse_placeholder(std::string_view content, const std::string& file) {
  refuse_lfs_pointer(content, file);
  content = beginning_of(content);
  std::string head(content.substr(0, 14));
  std::transform(head.begin(), head.end(), head.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  if (head.starts_with("<!doctype html") || head.starts_with("<html"))
    fail(ErrorCode::format, "`" + file + "` is an HTML page: a web page was saved in the place of the file",
         "download the file itself, with hf download ORG/NAME, or by a link with /resolve/ in place of "
         "/blob/");
}

}  // namespace capstan
