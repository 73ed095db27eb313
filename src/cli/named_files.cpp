#include "cli/named_files.hpp"

#include <filesystem>
#include <optional>

#include "base/text.hpp"
#include "config/foreign.hpp"

namespace capstan::cli {

namespace {

namespace fs = std::filesystem;

bool exists(const std::string& path) {
  std::error_code unknown;
  return fs::exists(path, unknown);
}

// Names in the same directory that are like it; of a dataset the prefixes.
std::vector<std::string> near_names(const std::string& name, const fs::path& path, bool dataset) {
  constexpr size_t kMost = 2000;
  std::vector<std::string> names;
  std::error_code unknown;
  for (fs::directory_iterator entry(path.parent_path(), unknown), end; !unknown && entry != end;
       entry.increment(unknown)) {
    if (names.size() == kMost) break;
    if (!dataset)
      names.push_back(entry->path().filename().string());
    else if (entry->path().extension() == ".idx")
      names.push_back(entry->path().stem().string());
  }
  std::vector<std::string> near = near_matches(path.filename().string(), names);
  const std::string directory = name.substr(0, name.find_last_of("/:") + 1);
  for (std::string& one : near) one.insert(0, directory);
  return near;
}

class Search {
 public:
  Search(const config::Resolution& resolution, config::Level level)
      : resolution_(resolution), level_(level) {}

  void file(const char* field, const config::Path& path) {
    const std::string target(config::split_scheme(path.resolved).path);
    if (!exists(target)) add(field, path.text, target, false);
  }
  void file(const char* field, const std::optional<config::Path>& path) {
    if (path) file(field, *path);
  }
  void files(const char* field, const std::vector<config::Path>& paths) {
    for (const config::Path& path : paths) file(field, path);
  }
  void dataset(const char* field, const std::string& name, const std::string& prefix) {
    if (!exists(prefix + ".bin") || !exists(prefix + ".idx")) add(field, name, prefix, true);
  }
  std::vector<config::Diagnostic> take() { return std::move(found_); }

 private:
  void add(const char* field, const std::string& name, const std::string& target, bool dataset) {
    config::Diagnostic problem;
    problem.level = level_;
    problem.code = "C0801";
    problem.name = "missing_file";
    problem.message = std::string("not found: ") + field + " = " + name;
    problem.path = field;
    problem.place = resolution_.origin(field).place;
    for (const std::string& near : near_names(name, target, dataset))
      problem.help("a similar name exists: `" + near + "`");
    found_.push_back(std::move(problem));
  }

  const config::Resolution& resolution_;
  config::Level level_;
  std::vector<config::Diagnostic> found_;
};

}  // namespace

std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level) {
  Search search(resolution, level);
  const config::Config& c = resolution.config;
  const config::DatasetConfig& d = c.dataset;
  search.file("checkpoint.load", c.checkpoint.load);
  search.file("checkpoint.pretrained_checkpoint", c.checkpoint.pretrained_checkpoint);
  if (c.peft) search.file("peft.adapter", c.peft->adapter);
  if (d.kind == config::DatasetKind::mock) return search.take();  // random tokens need no tokenizer either
  const auto& base = c.checkpoint.pretrained_checkpoint;
  const auto& tokenizer = c.tokenizer.tokenizer_model;
  if (tokenizer && !(base && base->resolved == tokenizer->resolved))  // that of the weights: named once
    search.file("tokenizer.tokenizer_model", tokenizer);
  search.file("tokenizer.vocab_file", c.tokenizer.vocab_file);
  search.file("tokenizer.merge_file", c.tokenizer.merge_file);
  if (d.kind == config::DatasetKind::sft) {
    search.files("dataset.train_files", d.train_files);
    search.files("dataset.valid_files", d.valid_files);
    search.files("dataset.test_files", d.test_files);
    return search.take();
  }
  for (const config::Path& item : d.data_path)
    if (!parse_double(item.text)) search.dataset("dataset.data_path", item.text, item.resolved);
  const std::pair<const char*, const config::Blend*> blends[] = {{"dataset.blend", &d.blend},
                                                                 {"dataset.train_blend", &d.train_blend},
                                                                 {"dataset.valid_blend", &d.valid_blend},
                                                                 {"dataset.test_blend", &d.test_blend}};
  for (const auto& [field, blend] : blends)
    for (const auto& [prefix, weight] : *blend) search.dataset(field, prefix, prefix);
  return search.take();
}

}  // namespace capstan::cli
