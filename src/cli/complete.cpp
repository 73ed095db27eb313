#include "cli/complete.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"
#include "cli/context.hpp"
#include "cli/help.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/core/library.hpp"
#include "config/tools/reference.hpp"
#include "config/tools/show.hpp"
#include "planner/cluster.hpp"
#include "train/records/run_list.hpp"

namespace capstan::cli {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxFiles = 2'000;

// A positional argument in the usage line of a command: "RECIPE", or alternatives such as "CHECKPOINT|RUN".
struct Positional {
  std::vector<std::string_view> kinds;
  bool optional = false;
};

// RECIPE, FILE.jsonl, hf:DIR: placeholders contain capitals.
bool is_kind(std::string_view word) {
  return std::any_of(word.begin(), word.end(), [](char c) { return c >= 'A' && c <= 'Z'; }) &&
         std::all_of(word.begin(), word.end(), [](char c) { return is_letter(c) || c == ':' || c == '.'; });
}

// The positional arguments of a usage line; options and their arguments are in the option table.
std::vector<Positional> positionals_of(const Command& command) {
  std::vector<Positional> wanted;
  bool skip = false, alternative = false;
  for (std::string_view token : split(command.usage, ' ')) {
    if (token == "|") {
      alternative = !skip;
      skip = false;
      continue;
    }
    const bool closes = token.ends_with(']');
    const bool optional = token.starts_with('[') || closes;
    while (token.starts_with('[')) token.remove_prefix(1);
    while (token.ends_with(']')) token.remove_suffix(1);
    if (token.ends_with("…")) token.remove_suffix(std::string_view("…").size());
    if (token.starts_with('-')) {
      skip = !closes;
      continue;
    }
    const bool skipped = std::exchange(skip, false);
    const auto kinds = split(token, '|');
    if (skipped || !std::all_of(kinds.begin(), kinds.end(), is_kind)) continue;
    if (!alternative || wanted.empty()) wanted.push_back({{}, optional});
    wanted.back().kinds.insert(wanted.back().kinds.end(), kinds.begin(), kinds.end());
    alternative = false;
  }
  return wanted;
}

class Completer {
 public:
  explicit Completer(std::string word) : word_(std::move(word)) {}

  std::vector<Candidate> take() { return std::move(found_); }

  void add(std::string text, std::string_view doc = {}) {
    if (text.starts_with(word_) && seen_.insert(text).second)
      found_.push_back({std::move(text), std::string(doc)});
  }

  void commands(std::string_view group = {}) {
    for (const Command* command : all_commands()) {
      const size_t blank = command->name.find(' ');
      if (!group.empty()) {
        if (command->name.substr(0, blank) == group && blank != std::string_view::npos)
          add(std::string(command->name.substr(blank + 1)), command->purpose);
      } else if (blank == std::string_view::npos) {
        add(std::string(command->name), command->purpose);
      } else {
        const std::string_view name = command->name.substr(0, blank);
        add(std::string(name), purpose_of_group(name));
      }
    }
  }

  void options(const Command* command) {
    const auto list = [&](std::span<const Option> options) {
      for (const Option& option : options) add("--" + std::string(option.name), option.doc);
    };
    if (command) list(command->options);
    if (command && command->overrides) list(override_options());
    list(global_options());
  }

  // Offers values of this kind for the part of the word after `prefix`.
  void kind(std::string_view kind, const Command* command, const std::string& prefix = {}) {
    if (kind == "RECIPE" || kind == "A" || kind == "B") {
      if (!at_path(prefix))
        for (const auto methods = library_.methods();
             const auto& entries : {methods, library_.recipes(methods)})
          for (const auto& entry : entries) add(prefix + entry.name, entry.description);
      files(prefix, {".yaml", ".yml"});
      if (kind != "RECIPE") runs(prefix);
    } else if (kind == "RUN" || kind == "CHECKPOINT") {
      runs(prefix);
    } else if (kind == "hf:DIR") {
      external(prefix + "hf:", "a Hugging Face model directory", true);
    } else if (kind == "gguf:FILE") {
      external(prefix + "gguf:", "a model of llama.cpp", false);
    } else if (kind == "FROM" || kind == "TO") {
      for (const char* one : {"RUN", "hf:DIR", "gguf:FILE"}) this->kind(one, command, prefix);
    } else if (kind.starts_with("FILE.")) {
      files(prefix, {kind.substr(4)});
    } else if (kind == "DIR" || kind == "SWEEP") {
      files(prefix, {}, true);
    } else if (kind == "FILE" || kind == "K,…") {
      files(prefix);
    } else if (kind == "PREFIX") {
      files(prefix, {".idx"}, false, true);
    } else if (kind == "SECTION") {
      const bool presets = command && command->name == "recipe ls";
      for (const auto& section : config::schema().sections())
        if (!section.name.empty() && (!presets || !library_.presets(section.name).empty()))
          add(prefix + section.name, section.doc);
      if (presets) add(prefix + "cluster", planner::cluster_fields().doc);
    } else if (kind == "CLUSTER") {
      for (const auto& entry : library_.presets("cluster")) add(prefix + entry.name, entry.description);
      files(prefix, {".yaml", ".yml"});
    } else if (kind == "PATH") {
      paths(prefix, "");
      if (command && command->name == "explain") subjects(prefix);
    } else if (kind == "K") {
      paths(prefix, "");
    } else if (kind == "K=V") {
      overrides();
    } else if (kind == "COMMAND") {
      commands();
    } else if (kind == "TOPIC") {
      for (const Topic& topic : topics()) add(std::string(topic.name), topic.title);
      const std::string reference(kReferenceTopic);
      add(reference, kReferenceTitle);
      // The pages of the reference would hide the other topics while no letter is typed.
      if (!word_.empty())
        for (const config::PageTitle& page : config::reference_titles(config::schema(), file_pages()))
          add(reference + "/" + page.name, page.title);
    } else if (kind == "SHELL") {
      for (const char* shell : {"bash", "zsh", "fish"}) add(shell);
    }
  }

  void value_of(const Option& option, const Command* command, const std::string& prefix) {
    if (option.choices.empty()) return kind(option.argument, command, prefix);
    for (const auto choice : split(option.choices, ' ')) add(prefix + std::string(choice));
  }

  // `section.field=value` and its other forms.
  void overrides() {
    if (word_.starts_with('@')) return files("@", {".yaml", ".yml"});
    const size_t sign = std::min(word_.find_first_not_of("~+"), word_.size());
    const std::string prefix = word_.substr(0, sign);
    const size_t equal = word_.find('=');
    if (equal == std::string::npos) return paths(prefix, prefix == "~" ? "" : "=");
    const bool append = equal > sign && word_[equal - 1] == '+';
    values(word_.substr(sign, equal - sign - append), word_.substr(0, equal + 1));
  }

 private:
  // Whether the word can only be a path.
  bool at_path(const std::string& prefix) const {
    return word_.size() > prefix.size() && word_.find('/', prefix.size()) != std::string::npos;
  }

  // Files and directories; `endings` empty: all. `bare`: without the ending.
  void files(const std::string& prefix, const std::vector<std::string_view>& endings = {},
             bool only_directories = false, bool bare = false) {
    if (!word_.starts_with(prefix)) return;
    const std::string typed = word_.substr(prefix.size());
    const size_t slash = typed.rfind('/');
    const std::string shown = slash == std::string::npos ? "" : typed.substr(0, slash + 1);
    const std::string start = typed.substr(shown.size());
    std::string directory = shown.empty() ? "." : shown;
    if (directory.starts_with("~/"))
      if (const char* home = std::getenv("HOME")) directory = home + directory.substr(1);
    std::vector<Candidate> list;
    std::error_code problem;
    for (fs::directory_iterator it(directory, problem), end; !problem && it != end; it.increment(problem)) {
      std::string name = it->path().filename().string();
      if (!name.starts_with(start) || (name[0] == '.' && start.empty()) || list.size() >= kMaxFiles) continue;
      // The answer has one line for each name, with a tab after the name.
      if (name.find_first_of("\n\t") != std::string::npos) continue;
      std::error_code ignored;
      if (it->is_directory(ignored)) {
        list.push_back({prefix + shown + name + "/", std::string(directory_doc(it->path()))});
        continue;
      }
      const auto ending =
          std::find_if(endings.begin(), endings.end(), [&](auto one) { return name.ends_with(one); });
      if (only_directories || (!endings.empty() && ending == endings.end())) continue;
      if (bare) name.resize(name.size() - ending->size());
      list.push_back({prefix + shown + name, {}});
    }
    std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (auto& one : list) add(std::move(one.text), one.doc);
  }

  static std::string_view directory_doc(const fs::path& path) {
    std::error_code ignored;
    if (fs::exists(path / records::kRunFile, ignored)) return "a run";
    if (fs::exists(path / checkpoint::kManifestFile, ignored)) return "a checkpoint";
    return {};
  }

  // An external model: its scheme, then paths.
  void external(const std::string& scheme, const char* doc, bool directory) {
    if (word_.starts_with(scheme))
      files(scheme, directory ? std::vector<std::string_view>{} : std::vector<std::string_view>{".gguf"},
            directory);
    else
      add(scheme, doc);
  }

  // Offers the runs in ./runs, and any directory.
  void runs(const std::string& prefix) {
    std::vector<Candidate> list;
    std::error_code problem;
    if (!at_path(prefix))
      for (fs::directory_iterator it("runs", problem), end; !problem && it != end; it.increment(problem)) {
        if (list.size() >= kMaxFiles || !records::is_run(it->path())) continue;
        std::string doc;
        try {
          const records::RunFile run = records::read_run_file(it->path());
          doc = run.state + ", " + run.recipe;
        } catch (const Error&) {
          doc = "a damaged run";
        }
        list.push_back({prefix + it->path().string(), doc});
      }
    std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (auto& one : list) add(std::move(one.text), one.doc);
    files(prefix, {}, true);
  }

  static std::string field_doc(const config::FieldInfo& field) {
    std::string text = field.doc + " (" + config::type_text(*field.type, field);
    if (!field.unit.empty()) text += ", " + field.unit;
    return text + ")";
  }

  void field(const std::string& spelling, const config::FieldInfo& field, const std::string& after) {
    const bool alias = !spelling.ends_with(field.path);
    add(spelling + after, (alias ? "= " + field.path + ": " : "") + field_doc(field));
  }

  // Offers sections, and after a dot the fields of one. `after` follows a field: "=" or nothing.
  void paths(const std::string& prefix, const std::string& after) {
    const config::Schema& schema = config::schema();
    const size_t dot = word_.find('.');
    if (dot == std::string::npos) {
      for (const auto& section : schema.sections()) {
        if (section.name.empty()) {
          for (const auto& one : section.fields) field(prefix + one.path, one, after);
          continue;
        }
        add(prefix + section.name + ".", section.doc);
        if (after.empty())
          add(prefix + section.name, section.doc);
        else if (section.optional || !library_.presets(section.name).empty())
          add(prefix + section.name + after, "a preset of " + section.name);
      }
      return;
    }
    for (const auto* one : schema.fields())
      if (one->deprecated.empty()) field(prefix + one->path, *one, after);
    // Offers aliases only when no canonical name matches.
    const bool known = !found_.empty();
    for (const auto* one : schema.fields())
      for (const auto& alias : one->aliases) {
        const std::string spelling =
            prefix + (alias.find('.') == std::string::npos ? one->section + "." + alias : alias);
        if (!known || spelling == word_) field(spelling, *one, after);
      }
  }

  void subjects(const std::string& prefix) {
    // Without a letter, only sections are offered.
    if (word_.size() == prefix.size()) return;
    for (const auto& rule : config::schema().rules()) {
      add(prefix + rule.code, rule.doc);
      add(prefix + rule.name, rule.doc);
    }
    for (const auto& code : config::diagnostic_codes()) add(prefix + code.code, code.title);
  }

  // prefix: the text before the value, "=" included.
  void values(const std::string& path, const std::string& prefix) {
    const config::Schema& schema = config::schema();
    const config::SectionInfo* section = schema.find_section(path);
    if (section && !section->name.empty()) {
      if (word_.starts_with(prefix + "@")) return files(prefix + "@", {".yaml", ".yml"});
      for (const auto& preset : library_.presets(path)) add(prefix + preset.name, preset.description);
      if (section->optional) add(prefix + "null", "switched off");
      return;
    }
    const config::FieldInfo* field = schema.find_spelling(path);
    if (!field) return;
    const config::Type* type = field->type;
    std::string before = prefix;
    if (type->kind == config::Type::Kind::list) {
      const size_t item = word_.find_last_of("[,");
      if (item != std::string::npos && item >= prefix.size())
        before = word_.substr(0, item + 1);
      else if (!field->scalar_ok && !prefix.ends_with("+="))
        before += "[";
      type = type->element;
    }
    const std::string standard = config::yaml_inline(*field->type, field->default_value);
    const auto choice = [&](const std::string& value, std::string doc) {
      if (value == standard && !field->required) doc += doc.empty() ? "default" : " (default)";
      add(before + value, doc);
    };
    switch (type->kind) {
      case config::Type::Kind::boolean:
        choice("true", "");
        choice("false", "");
        break;
      case config::Type::Kind::enumeration:
        for (const auto& entry : type->names->entries)
          choice(std::string(entry.name), std::string(entry.doc));
        break;
      case config::Type::Kind::integer:
        for (const int64_t value : field->one_of) choice(std::to_string(value), field->unit);
        break;
      case config::Type::Kind::path:
        files(before);
        break;
      default:
        break;
    }
    if (field->type->optional && before == prefix)
      choice("null", field->formula.empty() ? "unset" : "derived: " + field->formula);
  }

  std::string word_;
  std::vector<Candidate> found_;
  std::set<std::string> seen_;
  config::Library library_ = config::Library::standard();
};

const Option* find_option(std::span<const Option> table, const std::string& word) {
  for (const Option& option : table)
    if (word == "--" + std::string(option.name) ||
        (option.letter && word.size() == 2 && word[0] == '-' && word[1] == option.letter))
      return &option;
  return nullptr;
}

const Option* find_option(const Command* command, const std::string& word) {
  const Option* option = command ? find_option(command->options, word) : nullptr;
  if (!option && command && command->overrides) option = find_option(override_options(), word);
  return option ? option : find_option(global_options(), word);
}

const Command* find_command(const std::string& name) {
  for (const Command* command : all_commands())
    if (command->name == name) return command;
  return nullptr;
}

}  // namespace

std::vector<Candidate> complete(std::span<const std::string> words) {
  if (words.empty()) return {};
  Completer completer(words.back());
  const std::string& word = words.back();

  // Classifies the words before it: the command, options with their arguments, positional arguments and
  // overrides.
  const Command* command = nullptr;
  std::string group;
  // An option that waits for its argument.
  const Option* open = nullptr;
  bool only_words = false, changed = false, recipe = false;
  size_t plain = 0;
  for (const std::string& given : words.first(words.size() - 1)) {
    if (open) {
      recipe |= open->argument == "RECIPE";
      open = nullptr;
    } else if (given == "--") {
      only_words = true;
    } else if (!only_words && given.size() > 1 && given[0] == '-') {
      const Option* option = find_option(command, given);
      if (option && !option->argument.empty()) open = option;
      recipe |= given.starts_with("--recipe=");
    } else if (!command && group.empty()) {
      command = find_command(given);
      if (!command && words_of_group(all_commands(), given).empty()) return {};
      if (!command) group = given;
    } else if (!command) {
      command = find_command(group + " " + given);
      if (!command) return {};
    } else if (command->overrides && is_override_word(given)) {
      changed = true;
    } else {
      ++plain;
    }
  }

  if (open) {
    completer.value_of(*open, command, "");
    return completer.take();
  }
  if (!only_words && word.starts_with('-')) {
    const size_t equal = word.find('=');
    const Option* option = equal == std::string::npos ? nullptr : find_option(command, word.substr(0, equal));
    if (option && !option->argument.empty())
      completer.value_of(*option, command, word.substr(0, equal + 1));
    else if (equal == std::string::npos)
      completer.options(command);
    return completer.take();
  }
  if (!command) {
    completer.commands(group);
    return completer.take();
  }

  const std::vector<Positional> wanted = positionals_of(*command);
  const bool repeats = command->max_words == SIZE_MAX && !wanted.empty();
  const size_t at = repeats ? std::min(plain, wanted.size() - 1) : plain;
  bool path = false;
  if (at < wanted.size() && (repeats || plain < command->max_words) && !is_override_word(word))
    for (const auto kind : wanted[at].kinds) {
      // Positional arguments come before overrides.
      if (changed && kind == "PATH") continue;
      path |= kind == "PATH";
      completer.kind(kind, command);
    }
  // `help data prepare`, and the subcommands of a group.
  if (command->name == "help" && plain == 1) completer.commands(words[words.size() - 2]);
  size_t required = 0;
  bool names_recipe = recipe;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i].optional) required = i + 1;
    for (const auto kind : wanted[i].kinds)
      names_recipe |= i < plain && (kind == "RECIPE" || kind == "CHECKPOINT" || kind == "RUN");
  }
  if (command->overrides && !path && plain >= required && names_recipe) completer.overrides();
  return completer.take();
}

std::string candidates_text(std::span<const Candidate> candidates) {
  std::string text;
  for (const Candidate& one : candidates) {
    std::string line = one.text + (one.doc.empty() ? "" : "\t" + one.doc);
    for (char& c : line)
      if (c == '\n') c = ' ';
    text += line + "\n";
  }
  return text;
}

}  // namespace capstan::cli
