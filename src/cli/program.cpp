// Parses the global flags, finds and runs the command, and turns an error into a message and an exit code.
#include "cli/program.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/complete.hpp"
#include "cli/context.hpp"
#include "cli/help.hpp"
#include "cli/recipe_input.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"
#include "formats/external_model.hpp"
#include "kernels/cpu/level.hpp"

namespace capstan::cli {

namespace {

std::string_view value_of(const std::vector<std::string>& tokens, std::string_view flag) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == "--") break;
    if (tokens[i] == flag && i + 1 < tokens.size()) return tokens[i + 1];
    if (tokens[i].size() > flag.size() && tokens[i].starts_with(flag) && tokens[i][flag.size()] == '=')
      return std::string_view(tokens[i]).substr(flag.size() + 1);
  }
  return {};
}

// Message format and color of the flags, found before they are parsed: errors in the command line use them
// too.
MessageStyle message_style_of(const std::vector<std::string>& tokens) {
  MessageStyle result;
  ColorWhen when = ColorWhen::automatic;
  const std::string_view format = value_of(tokens, "--message-format"), color = value_of(tokens, "--color");
  if (format == "short") result.messages = MessageFormat::compact;
  if (format == "json") result.messages = MessageFormat::json;
  if (color == "always") when = ColorWhen::always;
  if (color == "never") when = ColorWhen::never;
  result.color = use_color(when, STDERR_FILENO);
  return result;
}

void change_directory(const std::string& directory) {
  if (::chdir(directory.c_str()) != 0)
    fail(ErrorCode::not_found, "cannot enter `" + directory + "`: " + system_error_text(errno));
}

int run_command(const std::vector<std::string>& command_line, const MessageStyle& style) {
  std::vector<std::string> tokens(command_line.begin() + 1, command_line.end());
  if (tokens.empty()) {
    print_stderr(program_help(false));
    return exit_code_of(ErrorCode::usage);
  }
  if (tokens[0] == kCompletionCommand) {
    put(candidates_text(complete(std::span(tokens).subspan(1))));
    return 0;
  }
  const auto at = find_command_word(tokens);
  if (!at) {
    // The command line has flags only: -h, --help, --version.
    for (const std::string& token : tokens) {
      if (token == "-h" || token == "--help") return put(program_help(token == "--help")), 0;
      if (token == "-V" || token == "--version") {
        Context context;
        context.command = *std::find_if(all_commands().begin(), all_commands().end(),
                                        [](const Command* command) { return command->name == "version"; });
        context.command_line = command_line;
        return context.command->run(context);
      }
    }
    Command nothing;
    nothing.name = "help";
    parse_arguments(nothing, tokens);
    print_stderr(program_help(false));
    return exit_code_of(ErrorCode::usage);
  }

  const std::string word = tokens[*at];
  tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(*at));
  const Command* command = nullptr;
  for (const Command* known : all_commands())
    if (known->name == word) command = known;
  if (const auto inner = words_of_group(all_commands(), word); !command && !inner.empty()) {
    const auto second = find_command_word(tokens);
    const bool help =
        std::any_of(tokens.begin(), tokens.end(), [](const auto& t) { return t == "-h" || t == "--help"; });
    if (!second) {
      if (help) return put(group_help(word)), 0;
      print_stderr(group_help(word));
      return exit_code_of(ErrorCode::usage);
    }
    const std::string name = word + " " + tokens[*second];
    for (const Command* known : all_commands())
      if (known->name == name) command = known;
    if (!command) {
      std::vector<std::string> names(inner.begin(), inner.end());
      std::string near = did_you_mean(tokens[*second], names);
      if (near.empty()) near = "one of: " + join(names, ", ");
      fail(ErrorCode::usage, "`capstan " + word + "` has no command `" + tokens[*second] + "`", near);
    }
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(*second));
  }
  if (!command) unknown_command(word);

  Context context;
  context.command = command;
  context.command_line = command_line;
  context.args = parse_arguments(*command, tokens);
  if (const auto help = context.args.value("help"))
    return put(help->starts_with("--") ? full_help(*command) : short_help(*command)), 0;
  context.messages = style.messages;
  context.verbosity = context.args.has("quiet") ? -1 : static_cast<int>(context.args.count("verbose"));
  for (const std::string& token : tokens) {
    if (token == "--") break;
    if (token == "-vv" || token == "-vvv") context.verbosity = 2;
  }
  const std::string color = context.args.value("color").value_or("auto");
  context.color_out = use_color(color == "always"  ? ColorWhen::always
                                : color == "never" ? ColorWhen::never
                                                   : ColorWhen::automatic,
                                STDOUT_FILENO);
  context.color_err = style.color;
  if (const auto directory = context.args.value("directory")) change_directory(*directory);
  // Refuses a wrong CAPSTAN_CPU before anything is written.
  kernels::cpu_level();
  return command->run(context);
}

}  // namespace

std::string command_text(const std::vector<std::string>& command) {
  return shell_line(command);
}

int run_program(const std::vector<std::string>& command) {
  formats::use_in_recipes();
  const MessageStyle style = message_style_of(command);
  try {
    const int code = run_command(command, style);
    finish_output();
    return code;
  } catch (const CommandExit& exit) {
    return exit.code;
  } catch (...) {
    return report(as_error(std::current_exception()), command, style);
  }
}

}  // namespace capstan::cli
