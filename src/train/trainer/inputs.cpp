#include "train/trainer/inputs.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "checkpoint/store.hpp"
#include "config/core/external.hpp"
#include "data/dataset_meta.hpp"
#include "data/indexed_dataset.hpp"
#include "data/input_stream.hpp"
#include "formats/external_model.hpp"
#include "models/registry.hpp"
#include "text/chat/chat_template.hpp"
#include "train/records/run_list.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/initial_state.hpp"
#include "train/trainer/state.hpp"
#include "train/trainer/tokenizer_setup.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

namespace {

class Search {
 public:
  // A file or a directory.
  void path(const char* field, const config::Path& path) {
    const auto [scheme, file] = config::split_scheme(path.resolved);
    if (exists(file)) return;
    add(field, path.text, near(path.text, fs::path(file)),
        scheme == "hf:" ? download_help(file) : std::string());
  }

  void paths(const char* field, const std::vector<config::Path>& list) {
    for (const config::Path& one : list) path(field, one);
  }

  // A file, or the name of a known template.
  void chat_template(const config::Path& given) {
    if (exists(given.resolved)) return;
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
    if (found_.size() > before || !config::split_scheme(given.resolved).scheme.empty()) return;
    const fs::path place = records::saved_in(given.resolved);
    std::error_code unknown;
    const fs::path root = fs::is_directory(place / "checkpoints", unknown) ? place / "checkpoints" : place;
    if (exists(place / checkpoint::kManifestFile) || (fs::is_directory(root, unknown) && has_steps(root)))
      return;
    // As the user wrote the name.
    std::string help = checkpoint::no_checkpoint_help(given.resolved);
    if (const size_t at = help.find(given.resolved); at != std::string::npos)
      help.replace(at, given.resolved.size(), given.text);
    found_.push_back({field, given.text,
                      std::string(field) + " = " + given.text +
                          (fs::is_directory(place, unknown) ? " holds no checkpoint" : " is no checkpoint"),
                      std::move(help)});
  }

  void prefix(const char* field, const std::string& name, const std::string& resolved) {
    const bool bin = exists(resolved + ".bin"), idx = exists(resolved + ".idx");
    if (bin && idx) return;
    if (bin || idx) return add(field, name + (bin ? ".idx" : ".bin"), "", "");
    add(field, name, near_paths_help(near_paths(name, resolved, NamedThing::dataset_prefix)),
        exists(resolved)
            ? "it takes the prefix of a prepared dataset: capstan data prepare " + name
            : "the prefix of what `capstan data prepare` has written: PREFIX.bin and PREFIX.idx");
  }

  std::vector<MissingFile> take() { return std::move(found_); }

 private:
  static bool exists(const fs::path& path) {
    std::error_code unknown;
    return fs::exists(path, unknown);
  }
  static bool has_steps(const fs::path& root) {
    try {
      return !checkpoint::list_checkpoints(root).empty();
    } catch (const Error&) {  // not readable: opening it reports the error
      return true;
    }
  }
  static std::string near(const std::string& text, const fs::path& resolved) {
    const auto [scheme, name] = config::split_scheme(text);
    auto names = near_paths(std::string(name), resolved);
    for (std::string& one : names) one.insert(0, scheme);
    return near_paths_help(names);
  }
  void add(const char* field, const std::string& name, const std::string& near,
           const std::string& otherwise) {
    for (const MissingFile& one : found_)
      if (one.field == field && one.name == name) return;
    const std::string elsewhere = std::string(field) + "=PATH names the right one";
    found_.push_back({field, name, not_found_text(field, name),
                      !near.empty()        ? near
                      : !otherwise.empty() ? otherwise
                                           : elsewhere});
  }

  std::vector<MissingFile> found_;
};

void look_for_tokenizer(const config::Config& config, Search& search) {
  const config::TokenizerConfig& t = config.tokenizer;
  // A fine-tuned model brings its own: one missing directory is said once.
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

// Prefixes of indexed datasets: the field, as the recipe has it, resolved.
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

void look_for_data(const config::DatasetConfig& d, Search& search) {
  if (d.kind == config::DatasetKind::sft) {
    search.paths("dataset.train_files", d.train_files);
    search.paths("dataset.valid_files", d.valid_files);
    search.paths("dataset.test_files", d.test_files);
    return;
  }
  if (d.kind == config::DatasetKind::mock) return;
  for_each_prefix(d, [&](const char* field, const std::string& name, const std::string& resolved) {
    search.prefix(field, name, resolved);
  });
}

}  // namespace

std::vector<MissingFile> missing_files(const config::Config& config, bool resumes) {
  Search search;
  const config::CheckpointConfig& c = config.checkpoint;
  if (!resumes && c.load) search.weights("checkpoint.load", *c.load);
  if ((!resumes || config.peft) && c.pretrained_checkpoint)
    search.weights("checkpoint.pretrained_checkpoint", *c.pretrained_checkpoint);
  if (!resumes && config.peft && config.peft->adapter) search.path("peft.adapter", *config.peft->adapter);
  if (config.dataset.kind != config::DatasetKind::mock) look_for_tokenizer(config, search);
  look_for_data(config.dataset, search);
  return search.take();
}

// The weights with which a new run begins have the shapes of the recipe's model.
static void check_weights(const config::Config& config) {
  const config::CheckpointConfig& c = config.checkpoint;
  if (c.load) {
    open_given_checkpoint(c);
    return;
  }
  if (!c.pretrained_checkpoint || (config.peft && config.peft->random_base)) return;
  const std::string& name = c.pretrained_checkpoint->resolved;
  const auto model = models::build(config.model);
  if (formats::is_external(name))
    return check_shapes(*formats::ExternalModel::open(name)->parameters(config.model), *model);
  const auto found = checkpoint::resolve_checkpoint(records::saved_in(name));
  check_shapes(checkpoint::Reader::open(found.path, checkpoint::Depth::structure), *model);
}

static void refuse_placeholders(const config::Path& file) {
  std::error_code unknown;
  if (!fs::is_regular_file(file.resolved, unknown)) return;
  data::InputStream stream(file.resolved);
  std::string beginning(512, '\0');
  beginning.resize(stream.read(beginning));
  refuse_placeholder(beginning, file.resolved);
}

std::vector<MissingFile> unusable_files(const config::Config& config, const std::vector<MissingFile>& missing,
                                        Inspection inspection) {
  std::vector<MissingFile> found;
  const auto is_missing = [&](std::string_view field, const std::string& name) {
    return std::any_of(missing.begin(), missing.end(), [&](const MissingFile& one) {
      return one.field == field && (name.empty() || one.name == name);
    });
  };
  const auto attempt = [&](const char* field, const std::string& name, FunctionRef<void()> open) {
    if (is_missing(field, name)) return;
    try {
      open();
    } catch (const Error& error) {
      // A tokenizer in a directory of weights that is missing, which `missing` names.
      if (error.code() == ErrorCode::not_found && !missing.empty()) return;
      found.push_back({field, name, error.message(), error.help()});
    }
  };
  const config::DatasetConfig& d = config.dataset;
  const char* const tokenizer_field =
      config.tokenizer.vocab_file ? "tokenizer.vocab_file" : "tokenizer.tokenizer_model";
  const std::string name = tokenizer_name(config.tokenizer);
  std::shared_ptr<const text::Tokenizer> tokenizer;
  if (inspection == Inspection::full) {
    const char* const field = config.checkpoint.load ? "checkpoint.load" : "checkpoint.pretrained_checkpoint";
    attempt(field, "", [&] { check_weights(config); });
  }
  if (d.kind == config::DatasetKind::mock || is_missing(tokenizer_field, "")) return found;
  const size_t before = found.size();
  bool readable = false;
  attempt(tokenizer_field, name, [&] {
    tokenizer = load_tokenizer(config);
    readable = true;
  });
  if (!readable) return found;  // the data are read with it
  for_each_prefix(d, [&](const char* field, const std::string& given, const std::string& resolved) {
    attempt(field, given, [&] {
      data::TokenizerCheck(tokenizer.get(), name, config.model.vocab_size)
          .check(data::IndexedDataset(resolved, config.model.vocab_size));
    });
  });
  const std::pair<const char*, const std::vector<config::Path>*> lists[] = {
      {"dataset.train_files", &d.train_files},
      {"dataset.valid_files", &d.valid_files},
      {"dataset.test_files", &d.test_files}};
  for (const auto& [field, files] : lists)
    for (const config::Path& file : *files) attempt(field, file.text, [&] { refuse_placeholders(file); });
  if (inspection == Inspection::full && missing.empty() && found.size() == before) {
    config::Config opened = config;
    opened.dataset.path_to_cache.reset();  // nothing is written
    attempt(d.kind == config::DatasetKind::sft ? "dataset.train_files" : "dataset.data_path", "",
            [&] { (void)open_datasets(opened, tokenizer.get()); });
  }
  return found;
}

void require_files(const std::vector<MissingFile>& missing) {
  if (missing.empty()) return;
  if (missing.size() == 1) fail(ErrorCode::not_found, missing[0].message, missing[0].help);
  std::string message = "the recipe names " + std::to_string(missing.size()) + " files that are not there:";
  for (const MissingFile& one : missing)
    message += "\n    " + one.message + (one.help.empty() ? "" : "\n        " + one.help);
  fail(ErrorCode::not_found, message);
}

}  // namespace capstan::train
