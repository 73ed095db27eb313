#include "train/trainer/inputs.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/actions.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/function_ref.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/store.hpp"
#include "config/core/external.hpp"
#include "data/dataset_meta.hpp"
#include "data/indexed_dataset.hpp"
#include "data/input_reader.hpp"
#include "text/chat/chat_template.hpp"
#include "train/records/run_list.hpp"
#include "train/setup/offload.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

namespace {

class MissingFileSearch {
 public:
  // A file or a directory. kind: what the name may be on the Hugging Face Hub.
  void path(const char* field, const config::Path& path, HubKind kind = HubKind::model) {
    const auto [scheme, file] = config::split_scheme(path.resolved);
    if (exists(file) || hidden(field, path.text, fs::path(file))) return;
    add(field, path.text, near(field, path.text, fs::path(file)),
        scheme == "hf:" ? download_help(file, kind) : std::string());
  }

  void data_files(const char* field, const std::vector<config::Path>& list) {
    for (const config::Path& one : list) path(field, one, HubKind::dataset);
  }

  // A file, or the name of a known template.
  void chat_template(const config::Path& given) {
    if (exists(given.resolved) || hidden("tokenizer.chat_template", given.text, given.resolved)) return;
    std::vector<std::string> names, known;
    for (const auto& one : text::chat::known_templates()) known.emplace_back(one.name);
    names = near_matches(fs::path(given.text).filename().string(), known, 2);
    for (const std::string& file : near_paths(given.text, given.resolved)) names.push_back(file);
    add("tokenizer.chat_template", given.text, near_paths_help(names),
        "a Jinja file, or one of the known templates: " + join(known, ", "));
  }

  // hf:DIR, gguf:FILE, a run, a directory of checkpoints or a checkpoint.
  void weights(const char* field, const config::Path& given) {
    const size_t before = found_.size();
    path(field, given);
    if (found_.size() > before) return;
    const bool external = !config::split_scheme(given.resolved).scheme.empty();
    const std::string scheme = external ? "" : config::model_scheme(given.resolved);
    if (std::string_view(field) == "checkpoint.load" && (external || !scheme.empty()))
      found_.push_back(
          {field, given.text, "checkpoint.load = " + given.text + " is a model of another program, not a run",
           "checkpoint.pretrained_checkpoint=" + scheme + given.text + " begins a run with its weights"});
    if (found_.size() > before || external) return;
    const fs::path saved = records::saved_in(given.resolved);
    std::error_code unknown;
    const fs::path root = fs::is_directory(saved / "checkpoints", unknown) ? saved / "checkpoints" : saved;
    if (exists(saved / checkpoint::kManifestFile) || (fs::is_directory(root, unknown) && has_steps(root)))
      return;
    // The help uses the name as the user wrote it.
    std::string help = checkpoint::no_checkpoint_help(given.resolved);
    if (const size_t at = help.find(given.resolved); at != std::string::npos)
      help.replace(at, given.resolved.size(), given.text);
    found_.push_back(
        {field, given.text,
         std::string(field) + " = " + given.text +
             (fs::is_directory(saved, unknown) ? " holds no checkpoint" : " is not a checkpoint"),
         std::move(help)});
  }

  void prefix(const char* field, const std::string& name, const std::string& resolved) {
    const bool bin = exists(resolved + ".bin"), idx = exists(resolved + ".idx");
    if ((bin && idx) || hidden(field, name, resolved + ".idx")) return;
    if (bin || idx) return add(field, name + (bin ? ".idx" : ".bin"), "", "");
    if (const auto held = prefixes_in(name, resolved); !held.empty())
      return add(field, name, near_paths_help(held), "");
    std::error_code unknown;
    const auto [scheme, hub_name] = config::split_scheme(name);
    const std::string download = scheme == "hf:" ? download_help(hub_name, HubKind::dataset) : std::string();
    add(field, name, near_paths_help(near_paths(name, resolved, MissingKind::dataset_prefix)),
        !download.empty() ? download + " to `capstan data prepare`"
        : fs::is_regular_file(resolved, unknown)
            ? "it takes the prefix of a prepared dataset: capstan data prepare " + name
            : "name a dataset of `capstan data prepare` by the prefix of PREFIX.bin and PREFIX.idx");
  }

  std::vector<MissingFile> take() { return std::move(found_); }

 private:
  static bool exists(const fs::path& path) {
    std::error_code unknown;
    return fs::exists(path, unknown);
  }
  // Reports a path below a directory that may not be entered: whether it exists is not known.
  bool hidden(const char* field, const std::string& name, const fs::path& path) {
    std::error_code problem;
    if (fs::exists(path, problem) || !problem) return false;
    found_.push_back(
        {field, name,
         "not readable: " + std::string(field) + " = " + escape_name(name) + ": " + problem.message(),
         problem == std::errc::permission_denied ? "this user may not enter a directory above it"
                                                 : std::string(field) + "=PATH names another path"});
    return true;
  }
  static bool has_steps(const fs::path& root) {
    try {
      return !checkpoint::list_checkpoints(root).empty();
    } catch (const Error&) {
      // Opening an unreadable file reports the error.
      return true;
    }
  }
  // The first prefixes of datasets in a directory, as the user would write them.
  static std::vector<std::string> prefixes_in(const std::string& name, const std::string& directory) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
         entry.increment(error))
      if (entry->path().extension() == ".idx")
        names.push_back((fs::path(name) / entry->path().stem()).string());
    std::sort(names.begin(), names.end());
    if (names.size() > 3) names.resize(3);
    return names;
  }
  static std::string near(std::string_view field, const std::string& text, const fs::path& resolved) {
    const auto [scheme, name] = config::split_scheme(text);
    auto names = near_paths(std::string(name), resolved);
    const bool weights = field == "checkpoint.pretrained_checkpoint";
    for (std::string& one : names)
      one.insert(0, scheme.empty() && weights ? config::model_scheme(one) : std::string(scheme));
    return near_paths_help(names);
  }
  void add(const char* field, const std::string& name, const std::string& near,
           const std::string& otherwise) {
    for (const MissingFile& one : found_)
      if (one.field == field && one.name == name) return;
    const std::string elsewhere = std::string(field) + "=PATH names another path";
    found_.push_back({field, name, not_found_text(field, name),
                      !near.empty()        ? near
                      : !otherwise.empty() ? otherwise
                                           : elsewhere});
  }

  std::vector<MissingFile> found_;
};

void look_for_tokenizer(const config::Config& config, MissingFileSearch& search) {
  const config::TokenizerConfig& t = config.tokenizer;
  // The pretrained directory may hold the tokenizer too: it is reported once if it is missing.
  const auto& base = config.checkpoint.pretrained_checkpoint;
  const auto one = [&](const char* field, const std::optional<config::Path>& path) {
    if (path && !(base && base->resolved == path->resolved)) search.path(field, *path);
  };
  switch (t.tokenizer_type) {
    case config::TokenizerKind::none:
    case config::TokenizerKind::byte:
      break;
    case config::TokenizerKind::huggingface:
    case config::TokenizerKind::sentencepiece:
      one("tokenizer.tokenizer_model", t.tokenizer_model);
      break;
    case config::TokenizerKind::gpt2_bpe:
      one("tokenizer.vocab_file", t.vocab_file);
      one("tokenizer.merge_file", t.merge_file);
      break;
  }
  if (t.chat_template && !names_known_template(*t.chat_template)) search.chat_template(*t.chat_template);
}

// Calls use(field, prefix as written, resolved prefix) for each indexed dataset.
void for_each_prefix(const config::DatasetConfig& d,
                     FunctionRef<void(const char*, const std::string&, const std::string&)> use) {
  for (const config::Path& item : d.data_path)
    if (!parse_double(item.text))
      use("dataset.data_path", item.text, item.resolved.empty() ? item.text : item.resolved);
  const std::pair<const char*, const config::Blend*> blends[] = {{"dataset.blend", &d.blend},
                                                                 {"dataset.train_blend", &d.train_blend},
                                                                 {"dataset.valid_blend", &d.valid_blend},
                                                                 {"dataset.test_blend", &d.test_blend}};
  for (const auto& [field, blend] : blends)
    for (const auto& [prefix, weight] : *blend) use(field, prefix, prefix);
}

void look_for_data(const config::DatasetConfig& d, MissingFileSearch& search) {
  if (d.kind == config::DatasetKind::sft) {
    search.data_files("dataset.train_files", d.train_files);
    search.data_files("dataset.valid_files", d.valid_files);
    search.data_files("dataset.test_files", d.test_files);
    return;
  }
  if (d.kind == config::DatasetKind::mock) return;
  for_each_prefix(d, [&](const char* field, const std::string& name, const std::string& resolved) {
    search.prefix(field, name, resolved);
  });
}

}  // namespace

std::vector<MissingFile> missing_files(const config::Config& config, bool resumes) {
  MissingFileSearch search;
  // Not created: a file system that is not mounted would go unnoticed.
  if (const auto& directory = state_directory(config))
    search.path("optimizer.optimizer_offload_path", *directory);
  const config::CheckpointConfig& c = config.checkpoint;
  if (!resumes && c.load) search.weights("checkpoint.load", *c.load);
  if ((!resumes || config.peft) && c.pretrained_checkpoint)
    search.weights("checkpoint.pretrained_checkpoint", *c.pretrained_checkpoint);
  if (!resumes && config.peft && config.peft->adapter) search.path("peft.adapter", *config.peft->adapter);
  if (config.dataset.kind != config::DatasetKind::mock) look_for_tokenizer(config, search);
  look_for_data(config.dataset, search);
  return search.take();
}

static void refuse_placeholders(const config::Path& file) {
  std::error_code unknown;
  if (!fs::is_regular_file(file.resolved, unknown)) return;
  data::InputReader reader(file.resolved);
  std::string beginning(512, '\0');
  beginning.resize(reader.read(beginning));
  refuse_placeholder(beginning, file.resolved);
}

namespace {

// Opens the inputs of a run as the run would, and collects the errors.
class InputProbe {
 public:
  InputProbe(const config::Config& config, const std::vector<MissingFile>& missing)
      : config_(config), missing_(missing) {}

  // Tokenizer, indices and the beginning of fine-tuning files.
  void read_beginnings() {
    const config::DatasetConfig& d = config_.dataset;
    const char* const field =
        config_.tokenizer.vocab_file ? "tokenizer.vocab_file" : "tokenizer.tokenizer_model";
    if (d.kind == config::DatasetKind::mock || is_missing(field, "")) return;
    const std::string name = tokenizer_name(config_.tokenizer);
    std::shared_ptr<const text::Tokenizer> tokenizer;
    // Reading the data needs the tokenizer.
    if (!attempt(field, name, [&] { tokenizer = load_tokenizer(config_); })) return;
    for_each_prefix(d, [&](const char* list, const std::string& given, const std::string& resolved) {
      attempt(list, given, [&] {
        data::TokenizerCheck(tokenizer.get(), name, config_.model.vocab_size)
            .check(data::IndexedDataset(resolved, config_.model.vocab_size));
      });
    });
    const std::pair<const char*, const std::vector<config::Path>*> lists[] = {
        {"dataset.train_files", &d.train_files},
        {"dataset.valid_files", &d.valid_files},
        {"dataset.test_files", &d.test_files}};
    for (const auto& [list, files] : lists)
      for (const config::Path& file : *files) attempt(list, file.text, [&] { refuse_placeholders(file); });
  }

  // The data as a run opens them, and the checkpoints with which it begins.
  OpenedFiles open_all(const RunOptions& options) {
    config::Config opened = config_;
    // Nothing is written.
    opened.dataset.path_to_cache.reset();
    OpenedFiles result;
    std::optional<RunData> data;
    const auto attempt_all = [&](const char* field, FunctionRef<void(Warnings&)> open) {
      Warnings warnings;
      const bool opens = attempt(field, "", [&] { open(warnings); });
      for (std::string& text : warnings) result.warnings.push_back({field, "", std::move(text), {}});
      return opens;
    };
    if (missing_.empty() && found_.empty())
      attempt_all(
          config_.dataset.kind == config::DatasetKind::sft ? "dataset.train_files" : "dataset.data_path",
          [&](Warnings& warnings) { data = open_data(opened, &warnings); });
    const RunData* const usable = data ? &*data : nullptr;
    const config::CheckpointConfig& c = opened.checkpoint;
    if (c.load)
      attempt_all("checkpoint.load",
                  [&](Warnings& warnings) { check_load(opened, options, usable, warnings); });
    std::string base;
    if (c.pretrained_checkpoint &&
        attempt_all("checkpoint.pretrained_checkpoint",
                    [&](Warnings& warnings) { base = check_pretrained(opened, usable, warnings); }) &&
        opened.peft && opened.peft->adapter && !c.load)
      attempt("peft.adapter", "", [&] { check_adapter(opened, base); });
    if (data) result.resident_data = data->bytes_in_memory();
    return result;
  }

  std::vector<MissingFile> take() { return std::move(found_); }

 private:
  bool is_missing(std::string_view field, const std::string& name) const {
    return std::any_of(missing_.begin(), missing_.end(), [&](const MissingFile& one) {
      return one.field == field && (name.empty() || one.name == name);
    });
  }
  // False where it failed, or was not tried because the file is missing.
  bool attempt(const char* field, const std::string& name, FunctionRef<void()> open) {
    if (is_missing(field, name)) return false;
    try {
      open();
      return true;
    } catch (const Error& error) {
      // The tokenizer may be in a directory that `missing_` names: that is reported already.
      if (error.code() != ErrorCode::not_found || missing_.empty())
        found_.push_back({field, name, error.message(), error.marked_help()});
      return false;
    }
  }

  const config::Config& config_;
  const std::vector<MissingFile>& missing_;
  std::vector<MissingFile> found_;
};

}  // namespace

std::vector<MissingFile> unusable_files(const config::Config& config, const std::vector<MissingFile>& missing,
                                        Inspection inspection, const RunOptions& options,
                                        OpenedFiles* opened) {
  InputProbe probe(config, missing);
  probe.read_beginnings();
  OpenedFiles learned = inspection == Inspection::full ? probe.open_all(options) : OpenedFiles();
  if (opened) *opened = std::move(learned);
  return probe.take();
}

// Why a directory cannot be made, or no file can be made in it; empty: both are possible. Parents that do not
// exist are made with it.
static std::string unwritable_reason(fs::path directory) {
  std::error_code unknown;
  while (!directory.empty() && !fs::exists(fs::symlink_status(directory, unknown)))
    directory = directory.parent_path();
  if (directory.empty()) directory = ".";
  const std::string quoted = "`" + directory.string() + "`";
  if (!fs::exists(directory, unknown)) return quoted + " is a link whose target does not exist";
  const bool is_directory = fs::is_directory(directory, unknown);
  const std::string_view kind = special_file_kind(directory);
  if (!is_directory)
    return quoted + " is " + (kind.empty() ? "a file" : std::string(kind)) + ", not a directory";
  if (!kind.empty() && kind != "a directory")
    return quoted + " is " + std::string(kind) + ": no file can be created there";
  if (::access(directory.c_str(), W_OK | X_OK) == 0) return {};
  return quoted + ": " + system_error_text(errno);
}

// The directory of optimizer state, unless it is missing: missing_files() names it then.
static void look_at_state_directory(const config::Config& config, const config::Path& directory,
                                    std::vector<MissingFile>& found) {
  const std::string field = "optimizer.optimizer_offload_path";
  std::error_code unknown;
  if (!fs::exists(fs::symlink_status(directory.resolved, unknown))) return;
  if (const std::string reason = unwritable_reason(directory.resolved); !reason.empty()) {
    found.push_back({field, directory.text, "not writable: " + field + " = " + directory.text + ": " + reason,
                     field + "=PATH names another directory"});
    return;
  }
  const fs::space_info space = fs::space(directory.resolved, unknown);
  if (unknown) return;
  const int ranks = ranks_on_one_host(config);
  const auto needed = static_cast<double>(estimate_step(config, 0, ranks).state_file) * ranks;
  if (needed <= static_cast<double>(space.available)) return;
  found.push_back({field, directory.text,
                   "too small: " + field + " = " + directory.text + ": " + human_bytes(needed) +
                       " of optimizer state of " + counted(ranks, "rank") + ", " +
                       human_bytes(static_cast<double>(space.available)) + " free",
                   field + "=PATH names another directory"});
}

std::vector<MissingFile> unwritable_directories(const config::Config& config, const RunOptions& options) {
  std::vector<MissingFile> found;
  const auto look = [&](const char* field, const std::string& shown, const std::string& name,
                        const fs::path& directory, const std::string& help) {
    if (const std::string reason = unwritable_reason(directory); !reason.empty())
      found.push_back({field, name, "not writable: " + shown + " = " + name + ": " + reason,
                       "the run creates this directory and writes to it; " + help});
  };
  try {
    const fs::path run = run_directory(options);
    look("name", "run directory", run.string(), run, "give {other_run_dir}");
  } catch (const Error& error) {
    found.push_back({"name", options.recipe.name, error.message(), error.marked_help()});
  }
  const auto field = [&](const char* name, const std::optional<config::Path>& path, bool used = true) {
    if (path && used)
      look(name, name, path->text, path->resolved, std::string(name) + "=PATH names another one");
  };
  field("checkpoint.save", config.checkpoint.save);
  field("dataset.path_to_cache", config.dataset.path_to_cache,
        config.dataset.kind == config::DatasetKind::gpt);
  field("logger.tensorboard_dir", config.logger.tensorboard_dir, config.logger.tensorboard);
  field("profiling.trace_dir", config.profiling.trace_dir, config.profiling.trace);
  if (const auto& directory = state_directory(config)) look_at_state_directory(config, *directory, found);
  return found;
}

static void refuse(ErrorCode code, const std::string& together, const std::vector<MissingFile>& found) {
  if (found.empty()) return;
  if (found.size() == 1) fail(code, found[0].message, found[0].help);
  std::string message = together + ":";
  for (const MissingFile& one : found)
    message += "\n    " + one.message + (one.help.empty() ? "" : "\n        " + plain_actions(one.help));
  fail(code, message);
}

void require_files(const std::vector<MissingFile>& missing) {
  refuse(ErrorCode::not_found,
         "the recipe names " + std::to_string(missing.size()) + " files that do not exist", missing);
}

void require_writable(const std::vector<MissingFile>& unwritable) {
  refuse(ErrorCode::io, std::to_string(unwritable.size()) + " directories of the run cannot be written",
         unwritable);
}

}  // namespace capstan::train
