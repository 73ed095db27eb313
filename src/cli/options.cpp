#include "cli/options.hpp"

#include <algorithm>
#include <boost/program_options.hpp>
#include <deque>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/core/field.hpp"

namespace capstan::cli {

namespace po = boost::program_options;

namespace {

const Option kGlobal[] = {
    {"help", 'h', "", "this help; -h is the short one", "everywhere"},
    {"quiet", 'q', "", "only warnings and errors", "everywhere"},
    {"verbose", 'v', "", "more detail; -vv still more", "everywhere"},
    {"color", 0, "WHEN", "auto, always or never", "everywhere", "auto always never"},
    {"message-format", 0, "FORM", "diagnostics as human, short (file:line:col) or json", "everywhere",
     "human short json"},
    {"no-input", 0, "", "never ask; fail instead", "everywhere"},
    {"directory", 'C', "DIR", "run as if started in DIR", "everywhere"},
};

const Option kOverride[] = {
    {"file", 'f', "FILE", "merge a YAML file, as @FILE does", "overrides"},
    {"set", 0, "K=V", "set a field, as K=V does", "overrides"},
    {"append", 0, "K=V", "append to a list, as K+=V does", "overrides"},
    {"unset", 0, "K", "back to the preset's or the default value, as ~K does", "overrides"},
};

std::vector<Option> table_of(const Command& command) {
  std::vector<Option> table(command.options.begin(), command.options.end());
  if (command.overrides) table.insert(table.end(), std::begin(kOverride), std::end(kOverride));
  table.insert(table.end(), std::begin(kGlobal), std::end(kGlobal));
  return table;
}

bool identifier(char c, bool first) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         (!first && ((c >= '0' && c <= '9') || c == '-'));
}

// `num-layers` → "model.num_layers"; empty unless one field alone has that name, here or elsewhere.
std::string field_of_flag(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  std::string path;
  for (const config::FieldInfo* field : config::schema().fields()) {
    const bool named =
        field->name == name ||
        std::find(field->aliases.begin(), field->aliases.end(), name) != field->aliases.end() ||
        std::find(field->known_as.begin(), field->known_as.end(), name) != field->known_as.end();
    if (!named) continue;
    if (field->name == name) return field->path;
    if (!path.empty()) return {};
    path = field->path;
  }
  return path;
}

// `--model.layers=4`, `--num-layers 4`: a field written as a flag. A name near a flag of the command counts
// as that flag misspelled.
std::string as_override(const std::string& token, const std::string* next,
                        const std::vector<std::string>& flags) {
  const size_t name = token.find_first_not_of('-');
  if (name == std::string::npos || !identifier(token[name], true)) return {};
  const size_t equal = token.find('=');
  std::string path = token.substr(name, equal == std::string::npos ? std::string::npos : equal - name);
  if (path.find('.') == std::string::npos) {
    if (!token.starts_with("--") || !near_matches(path, flags, 1).empty()) return {};
    path = field_of_flag(path);
  }
  if (path.empty()) return {};
  for (size_t i = 0; i < path.size(); ++i)
    if (path[i] != '.' && path[i] != '[' && path[i] != ']' && !identifier(path[i], false)) return {};
  if (equal != std::string::npos) return path + token.substr(equal);
  return path + "=" + (next && !next->empty() && (*next)[0] != '-' ? *next : "VALUE");
}

}  // namespace

bool is_override_word(std::string_view word) {
  if (word.empty() || word == "-" || word == "~") return false;
  if (word[0] == '=' || word[0] == '@') return true;
  if ((word[0] == '~' || word[0] == '+') && word.size() > 1 && word[1] != '/') return true;
  const size_t equal = word.find('=');
  if (equal == std::string_view::npos || equal == 0) return false;
  return word.substr(0, equal).find('/') == std::string_view::npos || word.find_first_of("[\"") < equal;
}

std::span<const Option> global_options() {
  return kGlobal;
}
std::span<const Option> override_options() {
  return kOverride;
}

size_t Arguments::count(std::string_view option) const {
  return static_cast<size_t>(
      std::count_if(values_.begin(), values_.end(), [&](const auto& v) { return v.first == option; }));
}

std::vector<std::string> Arguments::values(std::string_view option) const {
  std::vector<std::string> all;
  for (const auto& [name, value] : values_)
    if (name == option) all.push_back(value);
  return all;
}
std::optional<std::string> Arguments::value(std::string_view option) const {
  for (auto at = values_.rbegin(); at != values_.rend(); ++at)
    if (at->first == option) return at->second;
  return std::nullopt;
}

std::string Arguments::required(std::string_view option) const {
  auto text = value(option);
  if (!text) fail(ErrorCode::usage, "`--" + std::string(option) + "` is missing");
  return *text;
}

std::optional<int64_t> Arguments::integer(std::string_view option, int64_t least, int64_t most) const {
  const auto text = value(option);
  if (!text) return std::nullopt;
  const auto number = parse_int(*text);
  if (!number || *number < least || *number > most)
    fail(ErrorCode::usage, "`--" + std::string(option) + "` takes a whole number, not `" + *text + "`",
         most == INT64_MAX ? "at least " + std::to_string(least)
                           : "from " + std::to_string(least) + " to " + std::to_string(most));
  return number;
}

std::optional<double> Arguments::number(std::string_view option, double least, double most) const {
  const auto text = value(option);
  if (!text) return std::nullopt;
  const auto number = parse_double(*text);
  if (!number || !(*number >= least && *number <= most))
    fail(ErrorCode::usage, "`--" + std::string(option) + "` takes a number, not `" + *text + "`",
         "from " + to_text(least) + " to " + to_text(most));
  return number;
}

const std::string& Arguments::word(size_t index, std::string_view what) const {
  if (index >= words_.size()) fail(ErrorCode::usage, std::string(what) + " is missing");
  return words_[index];
}

std::string did_you_mean(std::string_view given, const std::vector<std::string>& candidates,
                         std::string_view prefix) {
  const auto near = near_matches(given, candidates);
  if (near.empty()) return {};
  std::string text = "did you mean ";
  for (size_t i = 0; i < near.size(); ++i) {
    if (i > 0) text += i + 1 == near.size() ? " or " : ", ";
    text += "`" + std::string(prefix) + near[i] + "`";
  }
  return text + "?";
}

// `--resume=auto` becomes `--resume` and the choice "auto"; `--resume` has the choice "".
static std::vector<std::string> without_choices(const std::vector<Option>& table,
                                                const std::vector<std::string>& tokens,
                                                std::deque<std::string>& choices) {
  std::vector<std::string> words = tokens;
  for (std::string& word : words) {
    if (word == "--") break;
    for (const Option& option : table) {
      const std::string flag = "--" + std::string(option.name);
      if (!option.argument.empty() || option.choices.empty() || !word.starts_with(flag)) continue;
      if (word.size() > flag.size() + 1 && word[flag.size()] == '=') {
        choices.push_back(word.substr(flag.size() + 1));
        word = flag;
      } else if (word == flag) {
        choices.emplace_back();
      }
    }
  }
  return words;
}

Arguments parse_arguments(const Command& command, const std::vector<std::string>& tokens) {
  const std::vector<Option> table = table_of(command);
  po::options_description description;
  std::vector<std::string> names;
  for (const Option& option : table) {
    names.emplace_back(option.name);
    std::string spelled(option.name);
    if (option.letter) spelled += std::string(",") + option.letter;
    description.add(boost::shared_ptr<po::option_description>(
        new po::option_description(spelled.c_str(), new po::untyped_value(option.argument.empty()), "")));
  }
  std::deque<std::string> choices;  // of flags that may have one, in their order
  const std::vector<std::string> words = without_choices(table, tokens, choices);
  po::parsed_options parsed(nullptr);
  try {
    const int style = po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
    parsed = po::command_line_parser(words).options(description).style(style).allow_unregistered().run();
  } catch (const po::invalid_command_line_syntax& error) {
    const std::string& name = error.get_option_name();
    if (error.kind() == po::invalid_syntax::empty_adjacent_parameter)
      fail(ErrorCode::usage, "`" + name + "=` has no value",
           "an empty value is written as a word of its own: `" + name + " \"\"`");
    if (error.kind() == po::invalid_syntax::extra_parameter)
      fail(ErrorCode::usage, "`" + name + "` takes no value");
    fail(ErrorCode::usage, "`" + name + "` needs a value");
  } catch (const po::error& error) {
    fail(ErrorCode::usage, error.what());
  }

  Arguments arguments;
  std::vector<std::string> problems, helps;
  const auto unknown = [&](const std::string& token, const std::string* next) {
    if (const std::string field = as_override(token, next, names); !field.empty()) {
      problems.push_back("`" + token + "` is not a flag");
      helps.push_back((command.overrides ? "overrides have no dashes: write `"
                                         : "overrides have no dashes, and this command takes none: `") +
                      field + "`");
      return;
    }
    problems.push_back("unknown flag `" + token.substr(0, token.find('=')) + "`");
    const std::string bare =
        token.substr(token.find_first_not_of('-') == std::string::npos ? 0 : token.find_first_not_of('-'));
    helps.push_back(token.starts_with("--") ? did_you_mean(bare.substr(0, bare.find('=')), names, "--")
                                            : std::string());
  };

  std::string skip_value_of_unknown;  // `--model.layers 4`: the 4 belongs to it
  for (size_t i = 0; i < parsed.options.size(); ++i) {
    const auto& option = parsed.options[i];
    const std::string first = option.original_tokens.empty() ? std::string() : option.original_tokens.front();
    if (option.unregistered) {
      const bool word_follows = i + 1 < parsed.options.size() && parsed.options[i + 1].position_key >= 0;
      const std::string* next = word_follows && !parsed.options[i + 1].value.empty()
                                    ? &parsed.options[i + 1].value.front()
                                    : nullptr;
      const std::string field = as_override(first, next, names);
      unknown(first, next);
      const auto near =
          near_matches(first.substr(std::min(first.find_first_not_of('-'), first.size())), names, 1);
      const bool takes_value =
          !field.empty() || (!near.empty() && std::any_of(table.begin(), table.end(), [&](const Option& o) {
            return o.name == near[0] && !o.argument.empty();
          }));
      if (next && takes_value && first.find('=') == std::string::npos) ++i;
      continue;
    }
    if (option.position_key >= 0) {
      const std::string word = option.value.empty() ? std::string() : option.value.front();
      if (command.overrides && is_override_word(word))
        arguments.overrides_.push_back(config::Override::token(word));
      else
        arguments.words_.push_back(word);
      continue;
    }
    const auto entry = std::find_if(table.begin(), table.end(),
                                    [&](const Option& o) { return o.name == option.string_key; });
    CAPSTAN_ASSERT(entry != table.end(), option.string_key);
    std::string value = option.value.empty() ? std::string() : option.value.front();
    if (entry->argument.empty() && !entry->choices.empty() && !choices.empty()) {
      value = choices.front();
      choices.pop_front();
    }
    const auto known = split(entry->choices, ' ');
    const bool plain_flag = entry->argument.empty() && value.empty();
    if (!plain_flag && !entry->choices.empty() &&
        std::find(known.begin(), known.end(), value) == known.end()) {
      problems.push_back("`--" + std::string(entry->name) + "` does not know `" + value + "`");
      helps.push_back("one of: " + join(std::vector<std::string>(known.begin(), known.end()), ", "));
    }
    // The earlier value would be ignored silently. Of the global flags the last one holds, for aliases and
    // wrappers.
    const bool of_command = std::any_of(command.options.begin(), command.options.end(),
                                        [&](const Option& o) { return o.name == entry->name; });
    const auto earlier = arguments.value(entry->name);
    if (of_command && !entry->argument.empty() && !entry->repeats && earlier && *earlier != value) {
      problems.push_back("`--" + std::string(entry->name) + "` is given twice: `" + *earlier + "` and `" +
                         value + "`");
      helps.push_back(entry->argument.ends_with(",…")
                          ? "one list: --" + std::string(entry->name) + " " + *earlier + "," + value
                          : std::string("leave one out"));
    }
    // The spelling of a flag distinguishes -h from --help.
    arguments.values_.emplace_back(entry->name, entry->argument.empty() && value.empty() ? first : value);
    if (!command.overrides) continue;
    using Kind = config::Override::Kind;
    if (entry->name == "file") arguments.overrides_.push_back(config::Override::file(value));
    if (entry->name == "set") arguments.overrides_.push_back({Kind::set, value});
    if (entry->name == "append") arguments.overrides_.push_back({Kind::append, value});
    if (entry->name == "unset") arguments.overrides_.push_back({Kind::unset, value});
  }
  if (!arguments.has("help")) {
    for (size_t i = command.max_words; i < arguments.words_.size(); ++i) {
      const std::string& word = arguments.words_[i];
      std::error_code ignored;
      problems.push_back("unexpected argument `" + word + "`");
      const bool next_is_equal = std::any_of(arguments.overrides_.begin(), arguments.overrides_.end(),
                                             [](const auto& o) { return o.text.starts_with("="); });
      if (command.overrides && next_is_equal) {
        const bool last = i + 1 == arguments.words_.size();
        helps.push_back("write `" + word + "=" + (last ? "VALUE" : arguments.words_[i + 1]) +
                        "` without blanks");
        break;
      }
      if (command.overrides && std::filesystem::is_regular_file(word, ignored)) {
        helps.push_back("to merge this file into the recipe write `@" + word + "`");
      } else if (command.overrides && config::schema().find_spelling(word)) {
        helps.push_back("to change the field write `" + word + "=VALUE`");
      } else if (command.overrides) {
        helps.push_back("an override is written `section.field=value`");
      } else {
        helps.emplace_back();
      }
    }
  }
  if (!problems.empty()) {
    std::string message = problems[0];
    if (!helps[0].empty() && problems.size() > 1) message += " (" + helps[0] + ")";
    for (size_t i = 1; i < problems.size(); ++i)
      message += "\n  and " + problems[i] + (helps[i].empty() ? "" : " (" + helps[i] + ")");
    std::string help = problems.size() == 1 ? helps[0] : std::string();
    if (help.empty()) help = "`capstan " + std::string(command.name) + " --help` lists the flags";
    fail(ErrorCode::usage, message, help);
  }
  return arguments;
}

std::optional<size_t> find_command_word(const std::vector<std::string>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string& token = tokens[i];
    if (token.empty() || token[0] != '-' || token == "-") return i;
    if (token == "--") return std::nullopt;
    for (const Option& option : kGlobal) {
      if (option.argument.empty()) continue;
      const bool spelled_long = token == "--" + std::string(option.name);
      const bool spelled_short = option.letter && token.size() == 2 && token[1] == option.letter;
      if (spelled_long || spelled_short) ++i;
    }
  }
  return std::nullopt;
}

std::vector<std::string_view> words_of_group(std::span<const Command* const> commands,
                                             std::string_view group) {
  std::vector<std::string_view> words;
  for (const Command* command : commands)
    if (command->name.size() > group.size() && command->name.starts_with(group) &&
        command->name[group.size()] == ' ')
      words.push_back(command->name.substr(group.size() + 1));
  return words;
}

}  // namespace capstan::cli
