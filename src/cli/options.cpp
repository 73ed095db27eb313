#include "cli/options.hpp"

#include <algorithm>
#include <boost/program_options.hpp>
#include <cmath>
#include <deque>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/core/field.hpp"

namespace capstan::cli {

namespace po = boost::program_options;

namespace {

const Option kGlobal[] = {
    {"help", 'h', "", "print this help; -h prints a short one", "everywhere"},
    {"quiet", 'q', "", "print only warnings and errors", "everywhere"},
    {"verbose", 'v', "", "print more detail; -vv still more", "everywhere"},
    {"color", 0, "WHEN", "use colors: auto, always or never", "everywhere", "auto always never"},
    {"message-format", 0, "FORM", "print diagnostics as human, short (file:line:col) or json", "everywhere",
     "human short json"},
    {"no-input", 0, "", "never ask; fail instead", "everywhere"},
    {"directory", 'C', "DIR", "run as if started in DIR", "everywhere"},
};

const Option kOverride[] = {
    {"file", 'f', "FILE", "merge a YAML file, as @FILE does", "overrides"},
    {"set", 0, "K=V", "set a field, as K=V does", "overrides"},
    {"append", 0, "K=V", "append to a list, as K+=V does", "overrides"},
    {"unset", 0, "K", "return to the preset's or the default value, as ~K does", "overrides"},
};

std::vector<Option> table_of(const Command& command) {
  std::vector<Option> table(command.options.begin(), command.options.end());
  if (command.overrides) table.insert(table.end(), std::begin(kOverride), std::end(kOverride));
  table.insert(table.end(), std::begin(kGlobal), std::end(kGlobal));
  return table;
}

bool identifier(char c, bool first) {
  return is_letter(c) || c == '_' || (!first && (is_digit(c) || c == '-'));
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

[[noreturn]] static void fail_range(std::string_view option, const std::string& given,
                                    const std::string& range) {
  fail(ErrorCode::usage, "`--" + std::string(option) + "` is " + given + ": it must be " + range);
}

std::optional<int64_t> Arguments::integer(std::string_view option, int64_t least, int64_t most) const {
  const auto text = value(option);
  if (!text) return std::nullopt;
  const std::string range = most == INT64_MAX
                                ? "at least " + std::to_string(least)
                                : "from " + std::to_string(least) + " to " + std::to_string(most);
  const auto number = parse_int(*text);
  if (number && (*number < least || *number > most)) fail_range(option, *text, range);
  if (number) return number;
  // More digits than an int64_t has.
  const std::string_view digits = std::string_view(*text).substr(text->starts_with('-') ? 1 : 0);
  if (!digits.empty() && digits.find_first_not_of("0123456789") == std::string_view::npos)
    fail_range(option, *text, "from " + std::to_string(least) + " to " + std::to_string(most));
  fail(ErrorCode::usage, "`--" + std::string(option) + "` takes an integer, not `" + *text + "`",
       "write an integer " + (most == INT64_MAX ? "of " : std::string()) + range);
}

std::optional<double> Arguments::number(std::string_view option, double least, double most,
                                        bool above_least) const {
  const auto text = value(option);
  if (!text) return std::nullopt;
  const std::string range = above_least ? "above " + to_text(least) + " and at most " + to_text(most)
                                        : "from " + to_text(least) + " to " + to_text(most);
  const auto number = parse_double(*text);
  if (!number || std::isnan(*number))
    fail(ErrorCode::usage, "`--" + std::string(option) + "` takes a number, not `" + *text + "`",
         "write a number " + range);
  if (*number < least || *number > most || (above_least && *number == least))
    fail_range(option, *text, range);
  return number;
}

const std::string& Arguments::word(size_t index, std::string_view what) const {
  if (index >= words_.size())
    fail(ErrorCode::usage, std::string(what) + " is missing", "usage: capstan " + usage_);
  return words_[index];
}

std::string did_you_mean(std::string_view given, const std::vector<std::string>& candidates,
                         std::string_view prefix, std::string_view suffix) {
  const auto near = near_matches(given, candidates);
  if (near.empty()) return {};
  std::string text = "did you mean ";
  for (size_t i = 0; i < near.size(); ++i) {
    if (i > 0) text += i + 1 == near.size() ? " or " : ", ";
    text += "`" + std::string(prefix) + near[i] + std::string(suffix) + "`";
  }
  return text + "?";
}

std::string choices_help(std::string_view given, const std::vector<std::string>& choices) {
  const std::string near = did_you_mean(given, choices);
  return near + (near.empty() ? "one of: " : " It takes one of: ") + join(choices, ", ");
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

// Parses the arguments of one command and collects what is wrong with them.
class ArgumentParser {
 public:
  explicit ArgumentParser(const Command& command) : command_(command), table_(table_of(command)) {
    for (const Option& option : table_) names_.emplace_back(option.name);
    arguments.usage_ = std::string(command.name) + " " + std::string(command.usage);
  }
  void parse(const std::vector<std::string>& tokens);
  void check_words();
  // One error with all problems, if there are any.
  void report() const;

  Arguments arguments;

 private:
  po::parsed_options parse_with_library(const std::vector<std::string>& words) const;
  bool add_unknown(const std::string& token, const std::string* next);
  void add_word(const std::string& word);
  void unknown_choice(const Option& option, const std::string& value);
  void add_option(const Option& option, const std::string& spelled, std::string value);
  void check_repeated(const Option& option, const std::string& value);
  std::string help_for_word(const std::string& word) const;
  void problem(std::string text, std::string help) {
    problems_.push_back(std::move(text));
    helps_.push_back(std::move(help));
  }

  const Command& command_;
  std::vector<Option> table_;
  std::vector<std::string> names_;
  // Values of flags that may have one, in their order.
  std::deque<std::string> choices_;
  std::vector<std::string> problems_, helps_;
};

po::parsed_options ArgumentParser::parse_with_library(const std::vector<std::string>& words) const {
  po::options_description description;
  for (const Option& option : table_) {
    std::string spelled(option.name);
    if (option.letter) spelled += std::string(",") + option.letter;
    description.add(boost::shared_ptr<po::option_description>(
        new po::option_description(spelled.c_str(), new po::untyped_value(option.argument.empty()), "")));
  }
  try {
    const int style = po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
    return po::command_line_parser(words).options(description).style(style).allow_unregistered().run();
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
}

// Whether the next word is its value: `--model.layers 4`.
bool ArgumentParser::add_unknown(const std::string& token, const std::string* next) {
  const std::string bare = token.substr(std::min(token.find_first_not_of('-'), token.size()));
  const std::string field = as_override(token, next, names_);
  if (!field.empty())
    problem("`" + token + "` is not a flag",
            (command_.overrides ? "overrides have no dashes: write `"
                                : "overrides have no dashes, and this command takes none: `") +
                field + "`");
  else
    problem("unknown flag `" + token.substr(0, token.find('=')) + "`",
            token.starts_with("--") ? did_you_mean(bare.substr(0, bare.find('=')), names_, "--") : "");
  if (!next || token.find('=') != std::string::npos) return false;
  const auto near = near_matches(bare, names_, 1);
  return !field.empty() ||
         (!near.empty() && std::any_of(table_.begin(), table_.end(), [&](const Option& option) {
           return option.name == near[0] && !option.argument.empty();
         }));
}

void ArgumentParser::add_word(const std::string& word) {
  if (command_.overrides && is_override_word(word))
    arguments.overrides_.push_back(config::Override::token(word));
  else
    arguments.words_.push_back(word);
}

// The earlier value would be ignored silently. Of the global flags the last one holds, for aliases and
// wrappers.
void ArgumentParser::check_repeated(const Option& option, const std::string& value) {
  const bool of_command = std::any_of(command_.options.begin(), command_.options.end(),
                                      [&](const Option& o) { return o.name == option.name; });
  const auto earlier = arguments.value(option.name);
  if (!of_command || option.argument.empty() || option.repeats || !earlier || *earlier == value) return;
  const std::string flag = "--" + std::string(option.name);
  problem(
      "`" + flag + "` is given twice: `" + *earlier + "` and `" + value + "`",
      option.argument.ends_with(",…") ? "one list: " + flag + " " + *earlier + "," + value : "leave one out");
}

void ArgumentParser::unknown_choice(const Option& option, const std::string& value) {
  std::vector<std::string> known;
  for (const std::string_view choice : split(option.choices, ' ')) known.emplace_back(choice);
  problem("`--" + std::string(option.name) + "` does not accept `" + value + "`", choices_help(value, known));
}

void ArgumentParser::add_option(const Option& option, const std::string& spelled, std::string value) {
  if (option.argument.empty() && !option.choices.empty() && !choices_.empty()) {
    value = choices_.front();
    choices_.pop_front();
  }
  const auto known = split(option.choices, ' ');
  const bool plain_flag = option.argument.empty() && value.empty();
  if (!plain_flag && !option.choices.empty() && std::find(known.begin(), known.end(), value) == known.end())
    unknown_choice(option, value);
  check_repeated(option, value);
  // The spelling of a flag distinguishes -h from --help.
  arguments.values_.emplace_back(option.name, plain_flag ? spelled : value);
  if (!command_.overrides) return;
  using Kind = config::Override::Kind;
  if (option.name == "file") arguments.overrides_.push_back(config::Override::file(value));
  if (option.name == "set") arguments.overrides_.push_back({Kind::set, value});
  if (option.name == "append") arguments.overrides_.push_back({Kind::append, value});
  if (option.name == "unset") arguments.overrides_.push_back({Kind::unset, value});
}

void ArgumentParser::parse(const std::vector<std::string>& tokens) {
  const po::parsed_options parsed = parse_with_library(without_choices(table_, tokens, choices_));
  const auto first = [](const std::vector<std::string>& texts) {
    return texts.empty() ? std::string() : texts.front();
  };
  for (size_t i = 0; i < parsed.options.size(); ++i) {
    const auto& option = parsed.options[i];
    const std::string spelled = first(option.original_tokens);
    if (option.unregistered) {
      const bool word_follows = i + 1 < parsed.options.size() && parsed.options[i + 1].position_key >= 0 &&
                                !parsed.options[i + 1].value.empty();
      if (add_unknown(spelled, word_follows ? &parsed.options[i + 1].value.front() : nullptr)) ++i;
    } else if (option.position_key >= 0) {
      add_word(first(option.value));
    } else {
      const auto entry = std::find_if(table_.begin(), table_.end(),
                                      [&](const Option& o) { return o.name == option.string_key; });
      CAPSTAN_ASSERT(entry != table_.end(), option.string_key);
      add_option(*entry, spelled, first(option.value));
    }
  }
}

std::string ArgumentParser::help_for_word(const std::string& word) const {
  std::error_code ignored;
  if (!command_.overrides) return {};
  if (std::filesystem::is_regular_file(word, ignored))
    return "to merge this file into the recipe write `@" + word + "`";
  if (config::schema().find_spelling(word)) return "to change the field write `" + word + "=VALUE`";
  return "an override is written `section.field=value`";
}

void ArgumentParser::check_words() {
  if (arguments.has("help")) return;
  const bool equal_sign_apart =
      command_.overrides && std::any_of(arguments.overrides_.begin(), arguments.overrides_.end(),
                                        [](const auto& o) { return o.text.starts_with("="); });
  const auto& words = arguments.words_;
  for (size_t i = command_.max_words; i < words.size(); ++i) {
    const std::string text = "unexpected argument `" + words[i] + "`";
    if (equal_sign_apart) {
      const std::string value = i + 1 == words.size() ? "VALUE" : words[i + 1];
      problem(text, "write `" + words[i] + "=" + value + "` without blanks");
      return;
    }
    problem(text, help_for_word(words[i]));
  }
}

void ArgumentParser::report() const {
  if (problems_.empty()) return;
  const bool one = problems_.size() == 1;
  std::string message;
  for (size_t i = 0; i < problems_.size(); ++i)
    message +=
        (i > 0 ? "\n  and " : "") + problems_[i] + (one || helps_[i].empty() ? "" : " (" + helps_[i] + ")");
  fail(ErrorCode::usage, message,
       one && !helps_[0].empty() ? helps_[0]
                                 : "`capstan " + std::string(command_.name) + " --help` lists the flags");
}

Arguments parse_arguments(const Command& command, const std::vector<std::string>& tokens) {
  ArgumentParser parser(command);
  parser.parse(tokens);
  parser.check_words();
  parser.report();
  return parser.arguments;
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
