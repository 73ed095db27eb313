// capstan sweep ask | tell: the ask-and-tell interface for external optimizers, as JSON lines.
#include <iostream>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"
#include "sweep/ask_tell.hpp"

namespace capstan::cli {

namespace {

// Prints a reply to each line of standard input. An invalid line gets an error as its reply, and sets the
// exit code.
template <class Reply>
int serve_lines(Reply reply) {
  int code = 0;
  for (std::string line; std::getline(std::cin, line);) {
    if (trim(line).empty()) continue;
    try {
      put(reply(line));
    } catch (const Error& error) {
      OrderedJson failure{{"error", error.message()}};
      if (!error.help().empty()) failure["help"] = with_flags(error.marked_help());
      put(dump_json(failure) + "\n");
      code = exit_code_of(error.code());
    }
    flush_output();
  }
  return code;
}

bool from_input(const Arguments& args) {
  if (args.words().size() < 2 || args.words()[1] != "-") return false;
  for (const char* option : {"values", "seed", "value", "step", "state", "reason"})
    if (args.has(option))
      fail(ErrorCode::usage, "`--" + std::string(option) + "` and `-`: lines come from standard input");
  return true;
}

int run_sweep_ask(Context& context) {
  const Arguments& args = context.args;
  sweep::Store store(args.word(0, "DIR"));
  std::set<std::string> given;
  if (from_input(args))
    return serve_lines([&](const std::string& line) { return sweep::ask(store, line, given); });
  if (args.words().size() > 1)
    fail(ErrorCode::usage, "unexpected `" + args.words()[1] + "`", "`-` reads lines from standard input");
  OrderedJson request = OrderedJson::object();
  if (const auto values = args.value("values")) {
    request["values"] = ordered_json_of(*values, IfNotJson::discard);
    if (!request["values"].is_object())
      fail(ErrorCode::usage, "`--values` is not a JSON object",
           R"(for example --values '{"optimizer.lr": 3e-4}')");
  }
  if (const auto seed = args.integer("seed", 0)) request["seed"] = *seed;
  put(sweep::ask(store, dump_json(request), given));
  return 0;
}

int run_sweep_tell(Context& context) {
  const Arguments& args = context.args;
  sweep::Store store(args.word(0, "DIR"));
  if (from_input(args)) return serve_lines([&](const std::string& line) { return sweep::tell(store, line); });
  OrderedJson request{{"trial", args.word(1, "TRIAL")}};
  if (const auto value = args.number("value", -1e300, 1e300)) request["value"] = *value;
  if (const auto step = args.integer("step", 0)) request["step"] = *step;
  for (const char* option : {"state", "reason"})
    if (const auto text = args.value(option)) request[option] = *text;
  put(sweep::tell(store, dump_json(request)));
  return 0;
}

}  // namespace

const Command kSweepAsk = {
    .name = "sweep ask",
    .purpose = "print the next pending trial, or one with given values, as JSON lines",
    .usage = "DIR [- | --values JSON [--seed N]]",
    .examples = {{"sweep ask sweeps/lr", "the next pending trial"},
                 {"sweep ask sweeps/lr --values '{\"optimizer.lr\": 3e-4}'", "a new trial with these values"},
                 {"sweep ask sweeps/lr -", "one JSON object per line of standard input, a reply to each"}},
    .options = {{"values", 0, "JSON", "fields of the trial with their values"},
                {"seed", 0, "N", "seed of the trial"}},
    .details =
        "Prints {\"trial\": ID, \"values\": …, \"recipe\": FILE, \"command\": […]}, or {\"trial\": null} "
        "if no trial is pending.\n"
        "Lines of standard input are {} or {\"values\": {…}, \"seed\": N}. An optimizer (Optuna: "
        "examples/optuna_sweep.py) asks,\n"
        "runs the command, and reads the result with `sweep tell`.\n",
    .max_words = 2,
    .run = run_sweep_ask,
};

const Command kSweepTell = {
    .name = "sweep tell",
    .purpose = "read or report the result of a trial, as JSON lines",
    .usage = "DIR TRIAL [--value X [--step N] | --state failed|pruned] [--reason TEXT]; DIR -",
    .examples = {{"sweep tell sweeps/lr 3f9c1a7e", "read state, value and step"},
                 {"sweep tell sweeps/lr 3f9c1a7e --value 2.71", "report a result from elsewhere"},
                 {"sweep tell sweeps/lr -", "one JSON object per line of standard input, a reply to each"}},
    .options = {{"value", 0, "X", "value of the metric"},
                {"step", 0, "N", "step of the value; default: the last"},
                {"state", 0, "STATE", "state of the trial: done, failed or pruned", "", "done failed pruned"},
                {"reason", 0, "TEXT", "reason for the state"}},
    .details =
        "Lines of standard input are {\"trial\": ID} to read and {\"trial\": ID, \"value\": X, \"step\": N} "
        "or\n"
        "{\"trial\": ID, \"state\": \"failed\", \"reason\": …} to report.\n",
    .max_words = 2,
    .run = run_sweep_tell,
};

}  // namespace capstan::cli
