#include "cli/help.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "cli/context.hpp"
#include "config/core/field.hpp"
#include "config/core/library.hpp"
#include "planner/cluster.hpp"

namespace capstan::cli {

namespace {

constexpr size_t kShortLines = 24;

struct HelpLine {
  std::string left, right;
};

std::string columns(const std::vector<HelpLine>& lines, size_t indent, size_t least_width) {
  size_t width = least_width;
  for (const HelpLine& line : lines)
    if (const size_t w = count_code_points(line.left); w <= 58) width = std::max(width, w);
  std::string text;
  for (const HelpLine& line : lines) {
    text += std::string(indent, ' ') + line.left;
    const size_t w = count_code_points(line.left);
    if (!line.right.empty()) text += std::string(w < width ? width - w + 2 : 2, ' ') + line.right;
    text += '\n';
  }
  return text;
}

HelpLine option_line(const Option& option) {
  std::string left = option.letter ? std::string("-") + option.letter + ", " : "    ";
  left += "--" + std::string(option.name);
  if (!option.argument.empty())
    left += " " + std::string(option.argument);
  else if (!option.choices.empty())
    left += "[=" + std::string(option.choices) + "]";
  return {left, std::string(option.doc)};
}

std::vector<HelpLine> option_lines(std::span<const Option> options) {
  std::vector<HelpLine> lines;
  for (const Option& option : options) lines.push_back(option_line(option));
  return lines;
}

std::vector<HelpLine> example_lines(const Command& command, size_t most) {
  std::vector<HelpLine> lines;
  for (size_t i = 0; i < command.examples.size() && i < most; ++i)
    lines.push_back({"capstan " + std::string(command.examples[i].command),
                     command.examples[i].doc.empty() ? "" : "# " + std::string(command.examples[i].doc)});
  return lines;
}

std::string opening(const Command& command) {
  std::string text = std::string(command.purpose) + "\n\nusage: capstan " + std::string(command.name);
  if (!command.usage.empty()) text += " " + std::string(command.usage);
  return text + "\n";
}

size_t line_count(std::string_view text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

const char* const kCheatSheet =
    "overrides:\n"
    "  a.b=c      set a field                 section=NAME  choose a preset; section=null: none\n"
    "  list+=x    append; list[0]=x replaces  @FILE         merge a YAML file (also -f FILE)\n"
    "  ~a.b       back to the preset or default             --set, --append, --unset: long forms\n";

struct CommandSummary {
  std::string_view name, purpose;
};

constexpr CommandSummary kGroups[] = {{"recipe", "list, copy, create, fix and import recipes"},
                                      {"data", "convert text to indexed datasets, and inspect them"},
                                      {"tokenizer", "train a tokenizer; encode and decode text"},
                                      {"runs", "list, show and plot runs"},
                                      {"sweep", "plan, run and compare hyperparameter sweeps"}};

constexpr std::string_view kRare[] = {"convert", "merge", "trace", "schema", "completion", "help", "version"};

// The commands in the order of the table, with one line for each group.
std::vector<CommandSummary> command_summaries() {
  std::vector<CommandSummary> lines;
  for (const Command* command : all_commands()) {
    const size_t blank = command->name.find(' ');
    if (blank == std::string_view::npos) {
      lines.push_back({command->name, command->purpose});
      continue;
    }
    const std::string_view group = command->name.substr(0, blank);
    if (!lines.empty() && lines.back().name == group) continue;
    lines.push_back({group, purpose_of_group(group)});
  }
  return lines;
}

// "reference" → the index of docs/reference/, "reference/model" → that page, without the mark of its heading;
// empty for another name. The pages are made from the tables in the program, as their files are.
std::string reference_text(const std::string& name) {
  std::string page = "README";
  if (name.starts_with(std::string(kReferenceTopic) + "/"))
    page = name.substr(kReferenceTopic.size() + 1);
  else if (name != kReferenceTopic)
    return {};
  const std::string text = config::reference_page(
      config::schema(), config::Library(config::library_files(), {}), page, file_pages());
  return text.substr(text.empty() ? 0 : 2);
}

}  // namespace

const std::vector<config::FilePage>& file_pages() {
  static const std::vector<config::FilePage> pages{{"cluster", &planner::cluster_fields()}};
  return pages;
}

std::string short_help(const Command& command) {
  std::string text = opening(command);
  text += "\n" + columns(example_lines(command, 3), 2, 0);
  std::string tail = "\ncapstan " + std::string(command.name) + " --help shows more";
  tail += command.overrides ? "; `capstan help overrides`, `capstan help recipes`\n" : "\n";
  std::string options;
  if (!command.options.empty()) options = "\n" + columns(option_lines(command.options), 2, 0);
  const std::string cheat = command.overrides ? std::string("\n") + kCheatSheet : std::string();
  // The short help fits a small terminal; the full help has the rest.
  if (line_count(text + options + cheat + tail) <= kShortLines) return text + options + cheat + tail;
  if (line_count(text + options + tail) <= kShortLines) return text + options + tail;
  std::vector<HelpLine> lines = option_lines(command.options);
  const size_t available = kShortLines - line_count(text + tail) - 1;
  lines.resize(std::min(lines.size(), available));
  return text + "\n" + columns(lines, 2, 0) + tail;
}

std::string full_help(const Command& command) {
  std::string text = opening(command);
  if (!command.examples.empty())
    text += "\nexamples:\n" + columns(example_lines(command, command.examples.size()), 2, 0);
  std::vector<std::string_view> groups;
  for (const Option& option : command.options)
    if (std::find(groups.begin(), groups.end(), option.group) == groups.end()) groups.push_back(option.group);
  for (const std::string_view group : groups) {
    std::vector<HelpLine> lines;
    for (const Option& option : command.options)
      if (option.group == group) lines.push_back(option_line(option));
    text +=
        "\n" + (group.empty() ? std::string("flags") : std::string(group)) + ":\n" + columns(lines, 2, 24);
  }
  if (command.overrides)
    text += std::string("\n") + kCheatSheet + columns(option_lines(override_options()), 2, 24);
  text += "\neverywhere:\n" + columns(option_lines(global_options()), 2, 24);
  if (!command.details.empty()) text += "\n" + std::string(command.details);
  if (!text.ends_with('\n')) text += '\n';
  return text + "\nSee also: capstan help overrides | recipes | exit-codes | files\n";
}

std::string_view purpose_of_group(std::string_view group) {
  for (const CommandSummary& known : kGroups)
    if (known.name == group) return known.purpose;
  return {};
}

std::string group_help(std::string_view group) {
  std::string purpose(purpose_of_group(group));
  if (!purpose.empty() && purpose[0] >= 'a' && purpose[0] <= 'z')
    purpose[0] = static_cast<char>(purpose[0] - 'a' + 'A');
  std::string text = purpose + ".\n\nusage: capstan " + std::string(group) + " COMMAND …\n\ncommands:\n";
  std::vector<HelpLine> lines, examples;
  for (const std::string_view word : words_of_group(all_commands(), group))
    for (const Command* command : all_commands())
      if (command->name == std::string(group) + " " + std::string(word)) {
        lines.push_back({std::string(word), std::string(command->purpose)});
        for (HelpLine& line : example_lines(*command, 1)) examples.push_back(std::move(line));
      }
  text += columns(lines, 2, 8);
  text += "\nexamples:\n" + columns(examples, 2, 0);
  return text + "\ncapstan " + std::string(group) + " COMMAND -h shows more\n";
}

std::string program_help(bool full) {
  std::string text =
      "Capstan trains transformer language models from one YAML recipe.\n\n"
      "usage: capstan COMMAND … [flags]\n\n"
      "  capstan train quickstart dataset=mock train.train_iters=20   # train, on random tokens\n"
      "  capstan check llama3-70b --ranks 128                         # find mistakes before the launch\n\n";
  std::vector<HelpLine> lines;
  // The short help keeps to a small terminal.
  std::string others;
  for (const CommandSummary& line : command_summaries())
    if (full || std::find(std::begin(kRare), std::end(kRare), line.name) == std::end(kRare))
      lines.push_back({std::string(line.name), std::string(line.purpose)});
    else
      others += (others.empty() ? "" : ", ") + std::string(line.name);
  if (!full) lines.push_back({"and", others});
  text += columns(lines, 2, 10);
  if (full) {
    text += "\nhelp topics (capstan help TOPIC):\n";
    lines.clear();
    for (const Topic& topic : topics()) lines.push_back({std::string(topic.name), std::string(topic.title)});
    lines.push_back(
        {std::string(kReferenceTopic), std::string(kReferenceTitle) + "; its pages: reference/model …"});
    text += columns(lines, 2, 10) + "\neverywhere:\n" + columns(option_lines(global_options()), 2, 24);
    return text +
           "\nFlags of a command: capstan COMMAND -h (short) or --help (all). Version: capstan version\n";
  }
  return text + "\ncapstan COMMAND -h · capstan --help · capstan help overrides\n";
}

void unknown_command(const std::string& word) {
  std::vector<std::string> names;
  for (const CommandSummary& line : command_summaries()) names.emplace_back(line.name);
  std::string help = did_you_mean(word, names);
  if (help.empty()) help = "`capstan -h` lists the commands";
  fail(ErrorCode::usage, "unknown command `" + word + "`", help);
}

// The first names one word of which is near: `tutorial-own-text` for `tutorail`.
static std::vector<std::string> names_with_word(const std::vector<std::string>& names,
                                                const std::string& given) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    // A short word is similar to too many others.
    constexpr size_t kLong = 6;
    std::vector<std::string> words;
    bool begins = false;
    for (const std::string_view word : split(name, '-')) {
      begins = begins || word.starts_with(given);
      if (given.size() >= kLong) words.emplace_back(word);
    }
    if (found.size() < 3 && (begins || !near_matches(given, words, 1).empty())) found.push_back(name);
  }
  return found;
}

std::string help_on(const std::vector<std::string>& words) {
  if (words.empty()) return program_help(true);
  const std::string name = join(words, " ");
  for (const Command* command : all_commands())
    if (command->name == name) return full_help(*command);
  std::string page = reference_text(name);
  for (const Topic& topic : topics())
    if (topic.name == name) page = topic.text;
  if (!words_of_group(all_commands(), name).empty())
    return group_help(name) + (page.empty() ? "" : "\n" + page);
  if (!page.empty()) return page;
  std::vector<std::string> names;
  for (const Command* command : all_commands()) names.emplace_back(command->name);
  for (const Topic& topic : topics()) names.emplace_back(topic.name);
  names.emplace_back(kReferenceTopic);
  for (const config::PageTitle& one : config::reference_titles(config::schema(), file_pages()))
    names.push_back(std::string(kReferenceTopic) + "/" + one.name);
  std::string help = did_you_mean(name, names);
  if (help.empty()) help = near_paths_help(names_with_word(names, name));
  if (help.empty()) help = "`capstan help` lists commands and topics";
  fail(ErrorCode::usage, "no help on `" + name + "`", help);
}

}  // namespace capstan::cli
