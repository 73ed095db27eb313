// capstan sweep table | plot
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "sweep/report.hpp"
#include "sweep/table.hpp"

namespace capstan::cli {

namespace {

sweep::Results results_of(const Context& context) {
  const sweep::Store store(context.args.word(0, "DIR"));
  std::optional<sweep::Metric> metric;
  if (const auto text = context.args.value("metric"))
    metric = sweep::metric_of(*text, store.plan().definition.metric);
  return sweep::read_results(store, metric);
}

std::string text_of_rows(const std::vector<std::vector<std::string>>& lines) {
  Table table;
  for (const auto& line : lines) table.add(line);
  return table.text();
}

int run_sweep_table(Context& context) {
  const Arguments& args = context.args;
  const bool csv = args.has("csv"), json = args.has("json"), md = args.has("md");
  if (csv + json + md > 1) fail(ErrorCode::usage, "--csv, --json and --md exclude each other");
  sweep::TableOptions options;
  options.top = args.integer("top", 1);
  if (const auto where = args.value("where")) options.where.push_back(*where);
  if (const auto keys = args.value("group-by"))
    for (const std::string_view key : split(*keys, ',')) options.group_by.emplace_back(trim(key));
  const sweep::Results results = results_of(context);
  const sweep::Table table = sweep::make_table(results, options);
  if (csv) return put(sweep::table_csv(table, results)), 0;
  if (json) return put(sweep::table_json(table, results)), 0;
  if (md) return put(sweep::table_markdown(table, results)), 0;

  const auto ranked = sweep::cells(table, results, sweep::RowSelection::ranked);
  const auto others = sweep::cells(table, results, sweep::RowSelection::others);
  if (ranked.size() > 1) put(text_of_rows(ranked));
  if (others.size() > 1)
    put((ranked.size() > 1 ? "\nnot ranked:\n" : "no trial is done yet:\n") + text_of_rows(others));
  put("\nranked by " + ranking_text(table.metric) + "\n");
  if (!table.invalid.empty())
    put(std::to_string(table.invalid.size()) + (table.invalid.size() == 1 ? " trial is" : " trials are") +
        " invalid: `capstan sweep status` lists the reasons\n");
  if (table.rows.empty() && !context.quiet()) print_stderr("no trial meets the condition\n");
  if (table.hidden > 0 && !context.quiet())
    print_stderr(std::to_string(table.hidden) + " more without --top\n");
  return 0;
}

int run_sweep_plot(Context& context) {
  const sweep::Results results = results_of(context);
  const std::filesystem::path directory = context.args.word(0, "DIR");
  const std::string file = context.args.value("output").value_or((directory / "report.html").string());
  refuse_other_content(file, "<!doctype html");
  write_file_durably(file, sweep::report_html(results, directory));
  put(file + "\n");
  return 0;
}

}  // namespace

const Command kSweepTable = {
    .name = "sweep table",
    .purpose = "print the results of a sweep, one row for each configuration",
    .usage = "DIR [--top N] [--where EXPR] [--group-by KEY,…] [--csv | --json | --md]",
    .examples = {{"sweep table sweeps/lr", "the best first; mean ± standard deviation over seeds"},
                 {"sweep table sweeps/lr --where 'lr>=3e-4 & val/loss<3'", "conditions on keys and results"},
                 {"sweep table sweeps/lr --group-by lr", "mean over all other keys"},
                 {"sweep table sweeps/lr --csv > lr.csv", "all digits"}},
    .options = {{"top", 0, "N", "print only the N best"},
                {"where", 0, "EXPR",
                 "print only rows that meet conditions joined by `&`: NAME=A,B  NAME!=A  NAME<X  <=  >  >="},
                {"group-by", 0, "KEY,…", "print one row for each value of these keys"},
                {"metric", 0, "NAME[:AT]",
                 "metric instead of the sweep's: loss, val/loss:best, `max accuracy:last`"},
                {"csv", 0, "", "print comma-separated values with all digits"},
                {"json", 0, "", "print one JSON object"},
                {"md", 0, "", "print Markdown"}},
    .details =
        "Columns are the keys that vary, the metric, steps, tokens/s, memory and time. Numbers are means "
        "over the completed\n"
        "seeds; `±` is their sample standard deviation. Conditions can also use `state`, `seed`, "
        "`trial`, `steps`,\n"
        "`tokens_per_second`, `memory_bytes`, `seconds`, `n` and `sd`. Failed, pruned and unfinished trials "
        "are listed below\n"
        "the table, with the reason.\n",
    .max_words = 1,
    .run = run_sweep_table,
};

const Command kSweepPlot = {
    .name = "sweep plot",
    .purpose = "plot a sweep as one HTML page: curves, axes, the best configuration",
    .usage = "DIR [-o FILE]",
    .examples = {{"sweep plot sweeps/lr", "into sweeps/lr/report.html"},
                 {"sweep plot sweeps/lr --metric val/loss:best -o val.html", ""}},
    .options = {{"output", 'o', "FILE", "file to write; default DIR/report.html"},
                {"metric", 0, "NAME[:AT]", "metric instead of the sweep's: loss, val/loss:best"}},
    .details =
        "Curves over steps, the metric against each axis, parallel coordinates, the best configuration's "
        "recipe, how much of the\n"
        "variance each axis explains (grids), and the table. The page needs no network.\n",
    .max_words = 1,
    .run = run_sweep_plot,
};

}  // namespace capstan::cli
