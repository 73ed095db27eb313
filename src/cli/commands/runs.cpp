// capstan runs ls | show
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "train/records/plot.hpp"
#include "train/records/run_list.hpp"

namespace capstan::cli {

namespace {

std::string last_step_text(const records::RunSummary& run) {
  return run.step ? std::to_string(*run.step) : "-";
}

std::string loss_text(const std::optional<double>& loss) {
  return loss ? fixed(*loss, 4) : "-";
}

// The step of a logged value, if the run has continued since.
std::string logged_at(const records::RunSummary& run) {
  return run.logged_step && run.logged_step != run.step ? ", step " + std::to_string(*run.logged_step) : "";
}

int run_runs_ls(Context& context) {
  const std::string root = context.args.words().empty() ? "runs" : context.args.words()[0];
  std::error_code unknown;
  if (!context.args.words().empty() && !std::filesystem::exists(root, unknown))
    fail(ErrorCode::not_found, not_found_text("directory", root), near_paths_help(near_paths(root)));
  const auto runs = records::list_runs(root);
  if (context.args.has("json")) {
    put(dump_json(
            OrderedJson{{"schema", "capstan.runs/1"}, {"runs", ordered_json_of(records::to_json(runs))}}) +
        "\n");
    return 0;
  }
  if (runs.empty()) {
    if (!context.quiet()) print_stderr("no runs in " + root + "\n");
    return 0;
  }
  Table table;
  table.add({"RUN", "STATE", "STEP", "LOSS", "STARTED", "RECIPE"});
  for (const records::RunSummary& run : runs)
    table.add({run.name, std::string(name_of(run.state)), last_step_text(run),
               loss_text(run.last_loss) + logged_at(run), run.started, run.recipe});
  put(table.text());
  return 0;
}

// The run directory that a word names: a path, or a name in ./runs.
std::filesystem::path run_named(const std::string& word) {
  std::filesystem::path path = word;
  if (!records::is_run(path) && records::is_run("runs" / path)) return "runs" / path;
  std::error_code unknown;
  if (!std::filesystem::exists(path, unknown)) {
    const std::string near = near_paths_help(near_runs(word, "runs", records::is_run));
    fail(ErrorCode::not_found, not_found_text("run", word),
         near.empty() ? "name a run directory; `capstan runs ls` lists those in ./runs" : near);
  }
  if (std::filesystem::is_directory(path, unknown) && !records::is_run(path))
    if (const auto runs = records::list_runs(path); !runs.empty())
      fail(ErrorCode::not_found, "`" + word + "` is a directory of runs, not a run",
           "name one of them, such as `" + runs.front().path.string() + "`; `capstan runs ls " + word +
               "` lists them");
  if (!records::is_run(path))
    fail(ErrorCode::not_found, "`" + word + "` is no run directory: it has no run.json",
         "`capstan runs ls` lists those in ./runs");
  return path;
}

int run_runs_plot(Context& context) {
  const Arguments& args = context.args;
  std::vector<std::filesystem::path> runs;
  for (const std::string& word : args.words()) runs.push_back(run_named(word));
  if (args.words().empty())
    for (const records::RunSummary& run : records::list_runs("runs")) {
      if (run.readable)
        runs.push_back(run.path);
      else if (!context.quiet())
        print_stderr("left out: " + run.path.string() + ": " + run.reason + "\n");
    }
  if (runs.empty()) fail(ErrorCode::not_found, "there are no runs in ./runs", "name run directories");
  const std::string file = args.value("output").value_or("runs.html");
  refuse_other_content(file, "<!doctype html");
  write_file_durably(file, records::plot_html(runs));
  put(file + "\n");
  return 0;
}

int run_runs_show(Context& context) {
  const std::filesystem::path path = run_named(context.args.word(0, "RUN"));
  const records::RunSummary run = records::summarize(path);
  const records::RunDetails details = records::details_of(path);
  if (context.args.has("json")) {
    put(dump_json(OrderedJson{{"schema", "capstan.run_summary/1"},
                              {"run", ordered_json_of(records::to_json(run, details))}}) +
        "\n");
    return 0;
  }
  Table table;
  table.add({"run", run.path.string()});
  table.add({"state", std::string(name_of(run.state)) + (run.reason.empty() ? "" : ": " + run.reason)});
  table.add({"recipe", run.recipe});
  table.add({"started", run.started});
  if (!run.ended.empty()) table.add({"ended", run.ended});
  table.add({"step", last_step_text(run)});
  const std::string at = logged_at(run);
  table.add({"loss", loss_text(run.last_loss) + at});
  if (details.validation_loss)
    table.add({"validation", "loss " + loss_text(details.validation_loss) +
                                 (details.perplexity ? ", perplexity " + fixed(*details.perplexity, 2) : "") +
                                 ", step " + std::to_string(*details.validation_step)});
  if (details.test_loss) table.add({"test", "loss " + loss_text(details.test_loss)});
  if (!run.file.data.empty()) table.add({"data", run.file.data});
  if (details.tokens) table.add({"tokens", human_count(static_cast<double>(*details.tokens)) + at});
  if (run.file.seed) table.add({"seed", std::to_string(*run.file.seed)});
  if (run.file.ranks > 0) table.add({"layout", run.file.layout + ", " + counted(run.file.ranks, "rank")});
  if (details.tokens_per_second)
    table.add({"tokens/s", human_count(*details.tokens_per_second) +
                               (details.mfu ? ", MFU " + fixed(100 * *details.mfu, 0) + "%" : "")});
  if (details.memory)
    table.add(
        {"memory",
         human_bytes(*details.memory) +
             (details.memory_estimated ? ", " + human_bytes(*details.memory_estimated) + " estimated" : "")});
  if (details.step_seconds)
    table.add({"first steps",
               significant(*details.step_seconds, 3) + " s each" +
                   (details.step_estimated_seconds ? ", " + significant(*details.step_estimated_seconds, 3) +
                                                         " s estimated for " + details.cluster
                                                   : "")});
  if (details.pipeline_bubble && details.pipeline_bubble_simulated)
    table.add({"bubble", fixed(100 * *details.pipeline_bubble, 1) + "% measured, " +
                             fixed(100 * *details.pipeline_bubble_simulated, 1) + "% simulated"});
  std::string steps;
  for (const int64_t step : run.checkpoints) steps += (steps.empty() ? "" : ", ") + std::to_string(step);
  table.add({"checkpoints", steps.empty() ? "none" : steps});
  put(table.text());
  return 0;
}

}  // namespace

const Command kRunsLs = {
    .name = "runs ls",
    .purpose = "list the runs of a directory, the latest first",
    .usage = "[DIR] [--json]",
    .examples = {{"runs ls", "of ./runs"}, {"runs ls experiments --json", ""}},
    .options = {{"json", 0, "", "print one JSON object"}},
    .max_words = 1,
    .run = run_runs_ls,
};

const Command kRunsPlot = {
    .name = "runs plot",
    .purpose = "plot curves of runs as one HTML page",
    .usage = "[RUN …] [-o FILE]",
    .examples = {{"runs plot", "every run in ./runs, into runs.html"},
                 {"runs plot quickstart runs/b -o two.html", "two of them"}},
    .options = {{"output", 'o', "FILE", "file to write; default runs.html"}},
    .details =
        "Loss with validation, gradient norm, learning rate, tokens/s, MFU and memory, with smoothing, "
        "logarithmic axes and the\n"
        "values at the pointer. The page needs no network.\n",
    .max_words = SIZE_MAX,
    .run = run_runs_plot,
};

const Command kRunsShow = {
    .name = "runs show",
    .purpose = "show one run: state, last step, validation, data, layout, checkpoints",
    .usage = "RUN [--json]",
    .examples = {{"runs show runs/quickstart", ""}, {"runs show quickstart", "the same, by name"}},
    .options = {{"json", 0, "", "print one JSON object"}},
    .max_words = 1,
    .run = run_runs_show,
};

}  // namespace capstan::cli
