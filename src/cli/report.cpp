#include "cli/report.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "base/json.hpp"
#include "cli/terminal.hpp"
#include "comm/world.hpp"

namespace capstan::cli {

Error as_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::no_fit, "the system has no memory left for this process"};
  } catch (const std::exception& error) {
    return {ErrorCode::internal, error.what()};
  } catch (...) {
    return {ErrorCode::internal, "an exception of unknown type"};
  }
}

std::string with_flags(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kFlags[] = {
      {"resume it", "resume it with --resume"},
      {"without resuming", "without --resume"},
      {"`resume=auto`", "--resume=auto"},
      {"resume from step 0", "resume from step 0 with --resume"},
      {"resume the run", "resume the run, with --resume,"},
      {"another run directory", "another run directory with --run-dir DIR"},
      {"another sweep directory", "another sweep directory with --out DIR"},
      {"`capstan sweep plan`", "`capstan sweep plan FILE --out DIR`"},
      {"allow it to be replaced", "allow it to be replaced with --overwrite"},
      {"with the token appended", "with `capstan data prepare --append-eod`"},
      {"convert the base to", "convert the base with --dtype"},
      {"name the base of the adapters", "name the base of the adapters: --base CHECKPOINT|RUN|hf:DIR"},
      {"such records can be left out and counted",
       "--on-bad-line skip leaves such records out and counts them"},
      {"the types bf16 and f32 can", "--type bf16 and f32 can"},
      {"give its format:", "--from FORMAT sets its format:"},
      {"extend a recipe that does", "--base names a recipe that does"},
      {"`capstan train` or mpirun", "`capstan train --nproc N` or mpirun"},
      {"is resumed from its own checkpoints", "continues with `capstan train … --resume`"},
      {"is resumed, never overwritten", "is continued with --resume, never overwritten"},
      {"begin a recipe from ", "begin a recipe: capstan recipe new my.yaml --from "},
      {"or the one given to the run", "or that of --run-dir"},
      {"as the model in place of the base", "as the model, without --adapter"},
  };
  for (const auto& [words, with_flag] : kFlags)
    for (size_t at = 0; (at = text.find(words, at)) != std::string::npos; at += with_flag.size())
      text.replace(at, words.size(), with_flag);
  return text;
}

std::string render_error(const Error& error, const std::vector<std::string>& command,
                         const MessageStyle& style) {
  if (style.messages == MessageFormat::json) {
    OrderedJson object = {{"level", "error"}, {"code", name_of(error.code())}, {"message", error.message()}};
    if (!error.context().empty()) object["context"] = error.context();
    if (!error.help().empty()) object["help"] = with_flags(error.help());
    object["exit_code"] = exit_code_of(error.code());
    return dump_json(object) + "\n";
  }
  std::string text = (style.color ? "\x1b[1;31merror\x1b[0m: " : "error: ") + error.message() + "\n";
  if (style.messages == MessageFormat::compact) {
    std::replace(text.begin(), text.end() - 1, '\n', ' ');
    return text;
  }
  for (const std::string& line : error.context()) text += "  = " + line + "\n";
  if (!error.help().empty()) text += "  = help: " + with_flags(error.help()) + "\n";
  if (error.code() == ErrorCode::internal)
    text +=
        "  = note: this is a bug in Capstan, not in what you did; please report it with the output of "
        "`capstan version`\n"
        "          and this command line: " +
        command_text(command) + "\n";
  return text;
}

int report(const Error& error, const std::vector<std::string>& command, const MessageStyle& style) {
  int rank = 0;
  try {
    rank = comm::launched_as().rank;
  } catch (const Error&) {
    // The launcher's variables themselves are wrong: every rank reports it.
  }
  std::string text = render_error(error, command, style);
  if (rank > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (style.messages != MessageFormat::json) text = "rank " + std::to_string(rank) + ": " + text;
  }
  print_stderr(text);
  return exit_code_of(error.code());
}

}  // namespace capstan::cli
