#include "base/missing.hpp"

#include <algorithm>
#include <optional>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "base/wording.hpp"

namespace capstan {

namespace fs = std::filesystem;

std::string not_found_text(std::string_view what, std::string_view name) {
  return "not found: " + std::string(what) + " = " + escape_name(name);
}

namespace {

// Maximum number of entries of a directory that are compared.
constexpr size_t kMaxEntries = 20000;
// Directories that are listed for one name: several directories may be near each misspelled one.
constexpr int kMaxListings = 60;
constexpr size_t kMaxNames = 3;

enum class Entries : uint8_t { all, directories, directories_and_datasets };

std::vector<std::string> entry_names(const fs::path& directory, Entries kind) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory.empty() ? fs::path(".") : directory, error), end;
       !error && it != end && names.size() < kMaxEntries; it.increment(error)) {
    const fs::path file = it->path().filename();
    std::error_code unknown;
    if (kind == Entries::all || it->is_directory(unknown))
      names.push_back(file.string());
    else if (kind == Entries::directories_and_datasets && file.extension() == ".idx" &&
             fs::exists(fs::path(it->path()).replace_extension(".bin"), unknown))
      names.push_back(file.stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool exists(const fs::path& path, MissingKind kind) {
  std::error_code unknown;
  if (kind == MissingKind::file) return fs::exists(path, unknown);
  return fs::is_directory(path, unknown) ||
         (fs::exists(path.string() + ".idx", unknown) && fs::exists(path.string() + ".bin", unknown));
}

// A path that does not exist, split where it stops to exist.
struct MissingPath {
  MissingPath(fs::path start, const fs::path& path) : directory(std::move(start)) {
    std::error_code unknown;
    bool there = true;
    for (const fs::path& part : path) {
      there = there && fs::is_directory(directory / part, unknown);
      if (there)
        directory /= part;
      else if (missing.empty())
        missing = part.string();
      else
        below /= part;
    }
  }
  // The longest beginning of the path that exists.
  fs::path directory;
  // The first component that does not exist. Empty: all of them exist.
  std::string missing;
  // The components after it.
  fs::path below;
};

// Datasets that are near a name where neither has the suffix that preparation adds: `onee` and
// `one_text_document`.
std::vector<std::string> near_without_suffix(std::string_view name,
                                             const std::vector<std::string>& datasets) {
  constexpr std::string_view kSuffix = "_text_document";
  std::vector<std::string> stems;
  for (const std::string& dataset : datasets)
    if (dataset.ends_with(kSuffix)) stems.push_back(dataset.substr(0, dataset.size() - kSuffix.size()));
  if (name.ends_with(kSuffix)) name.remove_suffix(kSuffix.size());
  std::vector<std::string> matches = near_matches(name, stems, kMaxNames);
  for (std::string& match : matches) match += kSuffix;
  return matches;
}

// Entries of a directory near the last component of a path.
std::vector<fs::path> near_entries(const MissingPath& path, MissingKind kind) {
  std::string name = path.missing;
  std::error_code unknown;
  const bool dataset = kind == MissingKind::dataset_prefix;
  // The text that was prepared, or one of the two files, in place of the prefix.
  if (dataset && fs::exists(path.directory / name, unknown)) name = fs::path(name).stem().string();
  const auto candidates =
      entry_names(path.directory, dataset ? Entries::directories_and_datasets : Entries::all);
  std::vector<std::string> matches = near_matches(name, candidates, kMaxNames);
  // `a` of `a_text_document`: too short to be near it by its letters.
  if (dataset && matches.empty())
    for (const std::string& candidate : candidates)
      if (candidate.starts_with(name + "_") && matches.size() < kMaxNames) matches.push_back(candidate);
  if (dataset && matches.empty()) matches = near_without_suffix(name, candidates);
  std::vector<fs::path> result;
  for (const std::string& match : matches)
    if (dataset || match != name) result.push_back(path.directory / match);
  return result;
}

// Existing paths near one that does not exist, corrected component by component, best first: those with one
// correction, else those with several. `directories` gets the existing beginnings of paths with one.
std::vector<fs::path> corrected(const MissingPath& path, MissingKind kind, int& listings,
                                std::vector<fs::path>* directories = nullptr) {
  if (path.missing.empty() || path.missing.size() > 255 || --listings < 0) return {};
  if (path.below.empty()) return near_entries(path, kind);
  std::vector<fs::path> once, several;
  for (const std::string& near :
       near_matches(path.missing, entry_names(path.directory, Entries::directories), kMaxNames)) {
    const fs::path found = path.directory / near;
    if (directories) directories->push_back(MissingPath(found, path.below).directory);
    if (exists(found / path.below, kind)) {
      once.push_back(found / path.below);
    } else {
      for (fs::path& deeper : corrected(MissingPath(found, path.below), kind, listings))
        several.push_back(std::move(deeper));
    }
  }
  std::vector<fs::path>& best = once.empty() ? several : once;
  if (best.size() > kMaxNames) best.resize(kMaxNames);
  return best;
}

// The one path that has the same components after the missing one, which is left out or is another directory.
// Looks neither into every directory of the file system's root nor into very many.
std::vector<fs::path> in_another_directory(const MissingPath& path, MissingKind kind) {
  constexpr size_t kMaxDirectories = 500;
  std::vector<fs::path> result;
  const bool is_root = path.directory.is_absolute() && path.directory == path.directory.root_path();
  if (path.below.empty() || is_root) return result;
  if (exists(path.directory / path.below, kind)) result.push_back(path.directory / path.below);
  const auto names = entry_names(path.directory, Entries::directories);
  if (names.size() > kMaxDirectories) return {};
  for (const std::string& name : names)
    if (!name.starts_with('.') && exists(path.directory / name / path.below, kind))
      result.push_back(path.directory / name / path.below);
  if (result.size() > 1) result.clear();
  return result;
}

bool is_hub_word(const std::string& word) {
  const auto allowed = [](char c) { return is_letter(c) || is_digit(c) || c == '-' || c == '_' || c == '.'; };
  return !word.empty() && word.size() <= 96 && word[0] != '.' &&
         std::all_of(word.begin(), word.end(), allowed);
}

}  // namespace

std::vector<std::string> near_paths(const std::string& name, const fs::path& resolved, MissingKind kind) {
  const fs::path path = (resolved.empty() ? fs::path(name) : resolved).lexically_normal();
  const MissingPath missing({}, path);
  int listings = kMaxListings;
  std::vector<fs::path> directories;
  std::vector<fs::path> found = corrected(missing, kind, listings, &directories);
  if (found.empty()) found = in_another_directory(missing, kind);
  if (found.empty()) found = std::move(directories);
  // Writes the path as the user wrote it, without the part of `resolved` before `name`.
  const std::string full_path = path.string(), written = fs::path(name).lexically_normal().string();
  const std::string before =
      full_path.ends_with(written) ? full_path.substr(0, full_path.size() - written.size()) : std::string();
  std::vector<std::string> result;
  for (const fs::path& one : found) {
    std::string text = one.string();
    if (text.starts_with(before)) text.erase(0, before.size());
    result.push_back(std::move(text));
  }
  return result;
}

std::vector<std::string> near_runs(const std::string& name, const std::string& directory,
                                   bool (*accepts)(const fs::path&)) {
  std::vector<std::string> near = near_paths(name);
  std::error_code unknown;
  const std::string in_runs = (fs::path(directory) / name).string();
  const bool absolute = fs::path(name).is_absolute();  // in_runs is `name` then
  if (!absolute && fs::exists(in_runs, unknown)) {
    near.push_back(in_runs);
  } else if (!absolute) {
    for (std::string& one : near_paths(in_runs)) near.push_back(std::move(one));
  }
  std::erase_if(near, [&](const std::string& one) { return !accepts(one); });
  return near;
}

std::string near_paths_help(const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string text = "did you mean ";
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "`" : i + 1 == names.size() ? " or `" : ", `") + names[i] + "`";
  return text + "?";
}

namespace {

struct HubName {
  std::string owner, model, revision;
};

// "https://huggingface.co/ORG/NAME/tree/main" names ORG/NAME. The slashes of an address collapse in a path.
std::optional<HubName> hub_name_of_address(const fs::path& path) {
  const std::vector<fs::path> parts(path.begin(), path.end());
  auto at = std::find_if(parts.begin(), parts.end(),
                         [](const fs::path& part) { return part == "huggingface.co" || part == "hf.co"; });
  if (at == parts.end()) return std::nullopt;
  if (++at != parts.end() && *at == "datasets") ++at;
  if (parts.end() - at < 2) return std::nullopt;
  return HubName{at[0].string(), at[1].string(), {}};
}

// "ORG/NAME" and "ORG/NAME@REVISION", unless the directory ORG exists.
std::optional<HubName> hub_name_of(const fs::path& path) {
  if (auto named = hub_name_of_address(path)) return named;
  std::error_code unknown;
  const fs::path directory = path.parent_path(), above = directory.parent_path();
  // `runs/NAME` is a run.
  if (fs::exists(directory, unknown) || directory.filename() == "runs") return std::nullopt;
  if (path.is_absolute() ? !fs::is_directory(above, unknown) : !above.empty()) return std::nullopt;
  HubName name{directory.filename().string(), path.filename().string(), {}};
  if (const size_t at = name.model.find('@'); at != std::string::npos) {
    name.revision = name.model.substr(at + 1);
    name.model.resize(at);
    if (!is_hub_word(name.revision)) return std::nullopt;
  }
  return name;
}

}  // namespace

std::string download_help(const fs::path& name, HubKind kind) {
  const auto hub = hub_name_of(name.lexically_normal());
  if (!hub || !is_hub_word(hub->model) || !is_hub_word(hub->owner)) return {};
  const std::string& model = hub->model;
  const std::string revision = hub->revision.empty() ? "" : " --revision " + hub->revision;
  if (kind == HubKind::dataset)
    return "nothing is downloaded by itself; a dataset of the Hugging Face Hub comes with: hf download " +
           hub->owner + "/" + model + revision + " --repo-type dataset --local-dir data/" + model +
           ", then name its .json or .jsonl files";
  const std::string start =
      "nothing is downloaded by itself; a model of the Hugging Face Hub comes with: hf download ";
  // `models/NAME` is where a user keeps models, not an organization of the Hub.
  if (hub->owner == "models") return start + "ORG/" + model + revision + " --local-dir models/" + model;
  return start + hub->owner + "/" + model + revision + " --local-dir " + model + ", then hf:" + model;
}

void fail_not_found(std::string_view what, const std::string& name, std::string otherwise, HubKind kind) {
  const size_t colon = name.find(':');
  const std::string_view scheme = colon != std::string::npos && colon > 1 && name.find('/') > colon
                                      ? std::string_view(name).substr(0, colon + 1)
                                      : std::string_view();
  const std::string path = name.substr(scheme.size());
  auto near = near_paths(path);
  for (std::string& one : near) one.insert(0, scheme);
  std::string help = near_paths_help(near);
  if (help.empty() && scheme == "hf:") help = download_help(path, kind);
  fail(ErrorCode::not_found, not_found_text(what, name), help.empty() ? std::move(otherwise) : help);
}

void refuse_placeholder(std::span<const std::byte> content, const std::string& file) {
  refuse_placeholder(std::string_view(reinterpret_cast<const char*>(content.data()), content.size()), file);
}

static std::string_view beginning_of(std::string_view content) {
  content = trim(content.substr(0, 512));
  return content.starts_with(kByteOrderMark) ? trim(content.substr(kByteOrderMark.size())) : content;
}

void refuse_lfs_pointer(std::string_view content, const std::string& file) {
  if (beginning_of(content).starts_with("version https://git-lfs.github.com/spec/"))
    fail(ErrorCode::format, "`" + file + "` is a Git LFS pointer: the file itself has not been downloaded",
         "in its repository: git lfs pull; or hf download ORG/NAME --local-dir DIR");
}

static bool is_html_page(std::string_view content) {
  const std::string head = lower_case(beginning_of(content).substr(0, 14));
  return head.starts_with("<!doctype html") || head.starts_with("<html");
}

void refuse_placeholder(std::string_view content, const std::string& file) {
  refuse_lfs_pointer(content, file);
  if (is_html_page(content))
    fail(ErrorCode::format, "`" + file + "` is an HTML page: a web page was saved in place of the file",
         "download the file itself, with hf download ORG/NAME, or by a link with /resolve/ in place of "
         "/blob/");
}

void HtmlPages::look(std::string_view content, const std::string& file) {
  if (!is_html_page(content)) return;
  std::string name = lower_case(file);
  for (const std::string_view packed : {".gz", ".zst"})
    if (name.ends_with(packed)) name.resize(name.size() - packed.size());
  Group& group = name.ends_with(".html") || name.ends_with(".htm") ? expected_ : unexpected_;
  if (group.count++ == 0) group.first = file;
}

std::string HtmlPages::Group::text(const char* one, const char* several) const {
  if (count == 0) return {};
  if (count == 1) return "`" + first + "` is an HTML page" + one;
  return "`" + first + "` and " + counted(count - 1, "other file") + " are HTML pages" + several;
}

std::string HtmlPages::warning() const {
  return unexpected_.text(": perhaps a failed download; a page that is meant as text is named .html",
                          ": perhaps failed downloads; pages that are meant as text are named .html");
}

std::string HtmlPages::note() const {
  return expected_.text("; its markup is part of the text", "; their markup is part of the text");
}

}  // namespace capstan
