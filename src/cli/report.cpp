#include "cli/report.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "base/json.hpp"
#include "base/text.hpp"
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

std::span<const Action> action_flags() {
  // The same actions as in plain_action_words() (base/actions.cpp).
  static constexpr Action kFlags[] = {
      // runs
      {"resume", "resume it with --resume"},
      {"resume_elsewhere", "resume the run, with --resume,"},
      {"resume_at_step_0", "resume from step 0 with --resume"},
      {"start", "start it without --resume; --resume=auto starts a run or resumes it"},
      {"other_run_dir", "another run directory with --run-dir DIR"},
      {"list_runs", "; `capstan runs ls` lists the runs in ./runs"},
      {"force", "`capstan train --force` starts the run all the same"},
      // models and adapters
      {"convert_base_to", "convert the base with --dtype"},
      {"name_base", "name the base of the adapters: --base CHECKPOINT|RUN|hf:DIR"},
      {"as_model", "as the model, without --adapter"},
      {"gguf_types", "--type bf16 and f32 can"},
      {"merge_adapters", "merge them instead: capstan merge"},
      // data
      {"prepare_again", "prepare the text again with `capstan data prepare`"},
      {"append_eod", "prepare the text again with `capstan data prepare --append-eod`"},
      {"overwrite", "allow it to be replaced with --overwrite"},
      {"skip_bad_lines", "--on-bad-line skip leaves such records out and counts them"},
      // sweeps
      {"plan_sweep", "`capstan sweep plan FILE --out DIR` plans a sweep"},
      {"other_sweep_dir", "another sweep directory with --out DIR"},
      // recipes and their import
      {"recipe_list", "`capstan recipe ls`"},
      {"show_and_diff", "`capstan show` and `capstan diff`"},
      {"new_recipe_from", "begin a recipe: capstan recipe new my.yaml --from"},
      {"name_format", "--from FORMAT sets its format:"},
      {"extend_recipe", "--base names a recipe"},
      {"variable", "--var "},
      {"launch_ranks", "`capstan train --nproc N` or mpirun starts the ranks"},
      {"resume_run", "a run here continues with `capstan train … --resume`"},
      {"resume_existing", "an existing run is continued with --resume, never overwritten"},
      {"run_dir_name", "the run directory has the recipe's name, or that of --run-dir"},
  };
  return kFlags;
}

std::string with_flags(std::string_view text) {
  return expand_actions(text, action_flags());
}

std::string render_error(const Error& error, const std::vector<std::string>& command,
                         const MessageStyle& style) {
  if (style.messages == MessageFormat::json) {
    OrderedJson object = {{"level", "error"}, {"code", name_of(error.code())}, {"message", error.message()}};
    if (!error.context().empty()) object["context"] = error.context();
    if (!error.help().empty()) object["help"] = with_flags(error.marked_help());
    object["exit_code"] = exit_code_of(error.code());
    return dump_json(object) + "\n";
  }
  std::string text =
      (style.color ? "\x1b[1;31merror\x1b[0m: " : "error: ") + escape_controls(error.message()) + "\n";
  if (style.messages == MessageFormat::compact) {
    std::replace(text.begin(), text.end() - 1, '\n', ' ');
    return text;
  }
  for (const std::string& line : error.context()) text += "  = " + escape_controls(line) + "\n";
  if (!error.help().empty()) text += "  = help: " + escape_controls(with_flags(error.marked_help())) + "\n";
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
