#include "cli/man.hpp"

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "cli/context.hpp"
#include "cli/help.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/core/field.hpp"

namespace capstan::cli {

namespace {

// Text as roff reads it: a backslash and a hyphen that is typed are escaped, `code` becomes bold.
std::string inline_text(std::string_view text, bool plain = false) {
  std::string out;
  bool bold = false;
  for (const char c : text) {
    if (c == '`' && !plain) {
      bold = !bold;
      out += bold ? "\\fB" : "\\fR";
    } else if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\n') {
      out += ' ';
    } else {
      out += c;
    }
  }
  return bold ? out + "\\fR" : out;
}

// One line of output. roff reads a line that begins with a period or an apostrophe as a request.
std::string line(std::string_view text, bool plain = false) {
  std::string out = inline_text(text, plain);
  if (out.starts_with('.') || out.starts_with('\'')) out.insert(0, "\\&");
  return out + "\n";
}

std::string bold(std::string_view text) {
  return "\\fB" + inline_text(text, true) + "\\fR";
}

std::string page_name(std::string_view command) {
  std::string name = "capstan";
  if (!command.empty()) name += "-" + std::string(command);
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string head(const std::string& name, int section, std::string_view purpose) {
  std::string title = name;
  for (char& c : title)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 32);
  return ".TH " + inline_text(title, true) + " " + std::to_string(section) +
         " \"\" \"capstan " CAPSTAN_VERSION "\" \"Capstan\"\n.SH NAME\n" + inline_text(name, true) + " \\- " +
         inline_text(purpose) + "\n";
}

std::string literal(const std::vector<std::string_view>& lines) {
  std::string out = ".PP\n.nf\n.RS 4\n";
  for (const auto one : lines) out += one.empty() ? "\\&\n" : line(one, true);
  return out + ".RE\n.fi\n";
}

std::string option_entries(std::span<const Option> options) {
  std::string out;
  for (const Option& option : options) {
    out += ".TP\n";
    if (option.letter) out += bold(std::string("-") + option.letter) + ", ";
    out += bold("--" + std::string(option.name));
    if (!option.argument.empty()) out += " \\fI" + inline_text(option.argument, true) + "\\fR";
    if (option.argument.empty() && !option.choices.empty()) out += "[=" + std::string(option.choices) + "]";
    out += "\n" + line(option.doc);
  }
  return out;
}

std::string examples(const Command& command) {
  std::string out;
  for (const Example& example : command.examples) {
    out += ".PP\n";
    if (!example.doc.empty()) out += line(std::string(example.doc) + ":");
    out += literal({"capstan " + std::string(example.command)}).substr(4);
  }
  return out;
}

std::string paragraphs(std::string_view text) {
  std::string out;
  bool fresh = true;
  for (const auto one : split(text, '\n')) {
    if (one.empty()) {
      fresh = true;
      continue;
    }
    if (fresh) out += ".PP\n";
    fresh = false;
    out += line(one);
  }
  return out;
}

// Converts a page of docs/ without its title: headings, paragraphs, lists, tables and indented text.
std::string markdown(std::string_view text) {
  std::string out;
  // Lines to be shown as they are.
  std::vector<std::string_view> block;
  const auto close = [&] {
    while (!block.empty() && block.back().empty()) block.pop_back();
    if (!block.empty()) out += literal(block);
    block.clear();
  };
  bool fresh = true, first = true, fenced = false;
  for (const auto one : split(text, '\n')) {
    if (std::exchange(first, false)) continue;
    if (one.starts_with("```")) {
      fenced = !fenced;
      close();
      fresh = true;
    } else if (fenced || one.starts_with("    ") || one.starts_with('|')) {
      block.push_back(one.starts_with("    ") && !fenced ? one.substr(4) : one);
    } else if (one.empty()) {
      if (!block.empty()) block.push_back(one);
      fresh = true;
    } else {
      close();
      if (one.starts_with('#')) {
        out += ".SS " + inline_text(trim(one.substr(one.find_first_not_of('#')))) + "\n";
        fresh = false;
      } else if (one.starts_with("- ")) {
        out += ".IP \\(bu 2\n" + line(one.substr(2));
        fresh = false;
      } else {
        if (fresh) out += ".PP\n";
        fresh = false;
        out += line(trim(one));
      }
    }
  }
  close();
  return out;
}

std::string topic_text(std::string_view name) {
  for (const Topic& topic : topics())
    if (topic.name == name) return std::string(topic.text);
  return {};
}

std::string see_also(const std::vector<std::string>& pages) {
  std::string out = ".SH SEE ALSO\n";
  for (size_t i = 0; i < pages.size(); ++i)
    out += bold(pages[i].substr(0, pages[i].size() - 3)) + pages[i].substr(pages[i].size() - 3) +
           (i + 1 < pages.size() ? ",\n" : "\n");
  return out;
}

std::string program_page() {
  std::string out = head("capstan", 1, "train transformer language models from one YAML recipe");
  out += ".SH SYNOPSIS\n\\fBcapstan\\fR \\fICOMMAND\\fR ... [\\fIflags\\fR]\n.SH COMMANDS\n";
  std::vector<std::string> pages;
  for (const Command* command : all_commands()) {
    out += ".TP\n" + bold(command->name) + "\n" + line(command->purpose);
    pages.push_back(page_name(command->name) + "(1)");
  }
  out += ".SH OPTIONS\nEvery command takes these.\n" + option_entries(global_options());
  out += ".SH EXIT STATUS\n" + markdown(topic_text("exit-codes"));
  out += ".SH ENVIRONMENT\n" + markdown(topic_text("environment"));
  out += ".SH FILES\n" + markdown(topic_text("files"));
  pages.push_back("capstan-recipe(5)");
  return out + see_also(pages);
}

std::string command_page(const Command& command) {
  std::string out = head(page_name(command.name), 1, command.purpose);
  out += ".SH SYNOPSIS\n" + bold("capstan " + std::string(command.name));
  if (!command.usage.empty()) out += " " + inline_text(command.usage, true);
  out += "\n";
  if (!command.details.empty()) out += ".SH DESCRIPTION\n" + paragraphs(command.details).substr(4);
  out += ".SH OPTIONS\n" + option_entries(command.options);
  if (command.overrides) out += option_entries(override_options());
  out += option_entries(global_options());
  if (!command.examples.empty()) out += ".SH EXAMPLES\n" + examples(command).substr(4);
  return out + see_also({"capstan(1)", "capstan-recipe(5)"});
}

std::string field_entry(const config::FieldInfo& field) {
  std::string out = ".TP\n" + bold(field.path) + "\n" + line(field.doc) + ".br\n";
  std::string about = config::type_text(*field.type, field);
  if (field.type->optional) about += ", or null";
  if (!field.unit.empty()) about += "; " + field.unit;
  about += field.required ? "; must be given"
                          : "; default " + config::yaml_inline(*field.type, field.default_value);
  if (!field.formula.empty()) about += "; derived where unset: " + field.formula;
  return out + line(about, true);
}

std::string recipe_page() {
  std::string out = head("capstan-recipe", 5, "the format of recipes");
  out += ".SH DESCRIPTION\n" + markdown(topic_text("recipes"));
  out += ".SH OVERRIDES\n" + markdown(topic_text("overrides"));
  out += ".SH UNITS\n" + markdown(topic_text("units"));
  out += ".SH FIELDS\n";
  for (const auto& section : config::schema().sections()) {
    if (!section.name.empty()) out += ".SS " + inline_text(section.name, true) + "\n" + line(section.doc);
    for (const auto& field : section.fields) out += field_entry(field);
  }
  return out + see_also({"capstan(1)", "capstan-check(1)", "capstan-explain(1)", "capstan-show(1)"});
}

}  // namespace

std::map<std::string, std::string> man_pages() {
  std::map<std::string, std::string> pages;
  pages["man1/capstan.1"] = program_page();
  for (const Command* command : all_commands())
    pages["man1/" + page_name(command->name) + ".1"] = command_page(*command);
  pages["man5/capstan-recipe.5"] = recipe_page();
  return pages;
}

}  // namespace capstan::cli
