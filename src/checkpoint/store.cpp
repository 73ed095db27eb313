#include "checkpoint/store.hpp"

#include <algorithm>

#include "base/missing.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"

namespace capstan::checkpoint {

namespace fs = std::filesystem;

static constexpr const char* kNameOne = "name a run directory or a checkpoint{list_runs}";

// Returns the step of a name such as "step-00000100"; nullopt for any spelling that step_directory_name()
// does not give.
static std::optional<int64_t> step_of(const std::string& directory_name) {
  if (!directory_name.starts_with("step-")) return std::nullopt;
  const auto step = parse_int(std::string_view(directory_name).substr(5));
  if (!step || *step < 0 || step_directory_name(*step) != directory_name) return std::nullopt;
  return step;
}

// "checkpoints/" and "checkpoints" are the same directory.
static std::string last_name(const fs::path& path) {
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

static std::vector<fs::path> entries_of(const fs::path& directory) {
  std::vector<fs::path> entries;
  std::error_code error;
  fs::directory_iterator iterator(directory, error);
  if (error == std::errc::no_such_file_or_directory) return entries;
  for (; !error && iterator != fs::directory_iterator(); iterator.increment(error))
    entries.push_back(iterator->path());
  if (error) fail(ErrorCode::io, "cannot read directory `" + directory.string() + "`: " + error.message());
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::vector<Checkpoint> list_checkpoints(const fs::path& root) {
  std::vector<Checkpoint> result;
  for (const auto& entry : entries_of(root)) {
    std::error_code error;
    const auto step = step_of(entry.filename().string());
    if (step && fs::is_directory(entry, error)) result.push_back({entry, *step});
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return result;
}

static std::string block_text(const std::string& file, int64_t block, int64_t block_bytes,
                              int64_t file_bytes) {
  return "`" + file + "` differs from what was written (checksum mismatch) in block " +
         std::to_string(block) + " (bytes " + std::to_string(block * block_bytes) + " to " +
         std::to_string(std::min((block + 1) * block_bytes, file_bytes)) + ")";
}

static void compare_content(const std::string& name, const fs::path& path, const FileHash& expected,
                            int64_t block_bytes, std::vector<Problem>& problems) {
  try {
    const FileHash actual = hash_file(path, block_bytes);
    bool named = false;
    for (size_t i = 0; i < std::min(actual.blocks.size(), expected.blocks.size()); ++i) {
      if (actual.blocks[i] == expected.blocks[i]) continue;
      const auto block = static_cast<int64_t>(i);
      problems.push_back({name, block, block_text(name, block, block_bytes, expected.bytes)});
      named = true;
    }
    if (!named && (actual.full != expected.full || actual.bytes != expected.bytes))
      problems.push_back({name, {}, "`" + name + "` differs from what was written"});
  } catch (const Error& error) {
    problems.push_back({name, {}, error.message()});
  }
}

std::vector<Problem> verify(const fs::path& directory, Verification verification, int part, int parts) {
  std::vector<Problem> problems;
  Manifest manifest;
  const fs::path manifest_path = directory / kManifestFile;
  try {
    std::error_code error;
    const auto type = fs::symlink_status(manifest_path, error).type();
    if (type == fs::file_type::not_found)
      return {{std::string(kManifestFile), {}, "it has no " + std::string(kManifestFile)}};
    if (type != fs::file_type::regular)
      return {{std::string(kManifestFile), {}, "`" + std::string(kManifestFile) + "` is not a regular file"}};
    manifest = parse_manifest(read_file(manifest_path, uint64_t{1} << 30), manifest_path.string());
  } catch (const Error& error) {
    return {{std::string(kManifestFile), {}, error.message()}};
  }
  if (const auto step = step_of(last_name(directory)); step && *step != manifest.info.step)
    problems.push_back({"",
                        {},
                        "the directory says step " + std::to_string(*step) + ", its manifest step " +
                            std::to_string(manifest.info.step)});
  for (const auto& entry : entries_of(directory)) {
    const std::string name = entry.filename().string();
    if (name != kManifestFile && !name.starts_with('.') && !manifest.files.count(name))
      problems.push_back({name, {}, "`" + name + "` is not in the manifest"});
  }
  int index = 0;
  for (const auto& [name, hash] : manifest.files) {
    const bool mine = index++ % parts == part;
    const fs::path path = directory / name;
    std::error_code error;
    const auto type = fs::symlink_status(path, error).type();
    if (type != fs::file_type::regular) {
      problems.push_back(
          {name,
           {},
           "`" + name + (type == fs::file_type::not_found ? "` is missing" : "` is not a regular file")});
      continue;
    }
    const auto size = static_cast<int64_t>(fs::file_size(path, error));
    if (size != hash.bytes) {
      problems.push_back(
          {name,
           {},
           "`" + name + "` has " + std::to_string(size) + " bytes instead of " + std::to_string(hash.bytes)});
      continue;
    }
    if (verification != Verification::content || !mine) continue;
    compare_content(name, path, hash, manifest.block_bytes, problems);
  }
  return problems;
}

SearchResult find_latest(const fs::path& root, Verification verification,
                         const std::optional<std::string>& run_id) {
  SearchResult search;
  for (const auto& checkpoint : list_checkpoints(root)) {
    std::string reason;
    if (const auto problems = verify(checkpoint.path, verification); !problems.empty()) {
      reason = problems.front().text;
      if (problems.size() > 1) reason += " (and " + std::to_string(problems.size() - 1) + " more)";
    } else if (run_id) {
      const std::string owner = Reader::open(checkpoint.path, Verification::structure).info().run_id;
      if (owner != *run_id)
        reason = "it belongs to run " + in_quotes(owner) + ", not to " + in_quotes(*run_id);
    }
    if (reason.empty()) {
      search.found = checkpoint;
      break;
    }
    search.refused.push_back({checkpoint, reason});
  }
  return search;
}

// Whether the path is a checkpoint, a run or a directory of checkpoints.
static bool has_checkpoints(const fs::path& path) {
  std::error_code error;
  return fs::exists(path / kManifestFile, error) || fs::is_directory(path / "checkpoints", error) ||
         !list_checkpoints(path).empty();
}

// Names near one that does not exist; the directory of a Hugging Face model with its scheme.
static std::vector<std::string> near_checkpoints(const fs::path& path) {
  auto near = near_runs(path.string(), "runs", [](const fs::path& one) {
    std::error_code error;
    return has_checkpoints(one) || fs::exists(one / "config.json", error);
  });
  for (std::string& name : near)
    if (!has_checkpoints(name)) name.insert(0, "hf:");
  return near;
}

std::string no_checkpoint_help(const fs::path& path) {
  std::error_code error;
  const fs::path model = path.has_filename() ? path : path.parent_path();
  if (fs::exists(path / "config.json", error))
    return "it holds a config.json: a model of Transformers is named hf:" + model.string();
  if (path.extension() == ".gguf") return "a GGUF file is named gguf:" + path.string();
  if (path.extension() == ".safetensors")
    return "safetensors are named by their directory: hf:" +
           (path.has_parent_path() ? path.parent_path().string() : ".");
  return kNameOne;
}

Checkpoint resolve_checkpoint(const fs::path& path, std::vector<std::string>* refused) {
  std::error_code error;
  if (!fs::exists(path, error)) {
    const std::string near = near_paths_help(near_checkpoints(path));
    const std::string download = near.empty() ? download_help(path) : std::string();
    fail(ErrorCode::not_found, not_found_text("run or checkpoint", path.string()),
         !near.empty()       ? near
         : !download.empty() ? download
                             : kNameOne);
  }
  if (fs::exists(path / kManifestFile, error))
    return {path, Reader::open(path, Verification::content).info().step};
  if (!fs::is_directory(path, error))
    fail(ErrorCode::not_found, "`" + path.string() + "` is not a checkpoint", no_checkpoint_help(path));
  const fs::path root = fs::is_directory(path / "checkpoints", error) ? path / "checkpoints" : path;
  const SearchResult search = find_latest(root, Verification::content);
  if (refused)
    for (const auto& one : search.refused)
      refused->push_back("`" + one.checkpoint.path.string() + "`: " + one.reason);
  if (search.found) return *search.found;
  if (search.refused.empty())
    fail(ErrorCode::not_found, "`" + path.string() + "` holds no checkpoint", no_checkpoint_help(path));
  std::string reasons;
  for (const auto& one : search.refused)
    reasons += "\n  " + one.checkpoint.path.filename().string() + ": " + one.reason;
  fail(ErrorCode::format, "no checkpoint of `" + path.string() + "` is valid:" + reasons);
}

static void move_to_trash(FileSystem& files, const fs::path& root, const Checkpoint& checkpoint) {
  fs::path trash;
  std::error_code error;
  for (int n = 0; trash.empty() || fs::exists(trash, error); ++n)
    trash = root / (".trash-" + step_directory_name(checkpoint.step) + "-" + std::to_string(n));
  files.rename_new(checkpoint.path, trash);
  files.sync_directory(root);
  files.remove_tree(trash);
}

std::vector<int64_t> apply_retention(FileSystem& files, const fs::path& root, const Retention& retention) {
  std::vector<int64_t> deleted;
  if (retention.most_recent < 0) return deleted;
  const auto all = list_checkpoints(root);
  std::vector<Checkpoint> sound;
  for (const auto& checkpoint : all)
    if (verify(checkpoint.path, Verification::structure).empty()) sound.push_back(checkpoint);
  const auto most_recent = static_cast<size_t>(std::max<int64_t>(retention.most_recent, 1));
  if (sound.size() <= most_recent) return deleted;
  // Delete older checkpoints only if a newer one that verifies is kept.
  size_t verified = 0;
  while (verified < sound.size() && sound[verified].step != retention.just_written &&
         !verify(sound[verified].path, Verification::content).empty())
    ++verified;
  std::vector<Checkpoint> old(
      sound.begin() + static_cast<int64_t>(std::min(std::max(most_recent, verified + 1), sound.size())),
      sound.end());
  std::reverse(old.begin(), old.end());
  for (const auto& checkpoint : old) {
    if (retention.keep_multiples && *retention.keep_multiples > 0 &&
        checkpoint.step % *retention.keep_multiples == 0)
      continue;
    move_to_trash(files, root, checkpoint);
    deleted.push_back(checkpoint.step);
  }
  return deleted;
}

void remove_leftovers(FileSystem& files, const fs::path& root) {
  for (const auto& entry : entries_of(root)) {
    const std::string name = entry.filename().string();
    if (name.starts_with(".tmp-step-") || name.starts_with(".trash-step-")) files.remove_tree(entry);
  }
}

}  // namespace capstan::checkpoint
