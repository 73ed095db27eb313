// capstan plan

#include <algorithm>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/budget_text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/plan_page.hpp"
#include "cli/plan_text.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/timeline_text.hpp"
#include "config/core/convert.hpp"
#include "config/sections/batch_ramp.hpp"
#include "planner/plan.hpp"

namespace capstan::cli {

namespace {

planner::MemoryChoice memory_choice(const Arguments& args) {
  const std::string name = args.value("memory").value_or("auto");
  if (name == "exact") return planner::MemoryChoice::exact;
  return name == "formula" ? planner::MemoryChoice::formula : planner::MemoryChoice::automatic;
}

std::string no_fit_help(const std::vector<planner::Change>& changes) {
  std::string help;
  for (size_t i = 0; i < std::min<size_t>(3, changes.size()); ++i)
    help += (help.empty() ? "" : ", or ") + shell_line(changes[i].overrides) + " (" +
            human_bytes(changes[i].bytes) + ")";
  return help.empty() ? "use more GPUs, or GPUs with more memory" : help;
}

// --cluster, with the price of --price-per-gpu-hour and the memory of --gpu-memory. What CUDA, NCCL and the
// driver take of the cluster's memory stays as it is.
planner::Cluster cluster_argument(const Arguments& args) {
  planner::Cluster cluster = planner::read_cluster(args.value("cluster").value_or("h100"));
  if (const auto price = args.number("price-per-gpu-hour", 0, 1e9)) cluster.price_per_hour = price;
  if (!args.has("gpu-memory")) return cluster;
  config::TextProblem problem;
  const std::string text = *args.value("gpu-memory");
  const auto given = config::bytes_from_text(text, problem);
  if (!given) fail(ErrorCode::usage, "--gpu-memory " + text + " " + problem.message, problem.help);
  const int64_t taken = cluster.memory.value - cluster.usable_memory.value;
  if (*given <= taken)
    fail(ErrorCode::usage,
         "--gpu-memory " + text + " is not more than the " + human_bytes(static_cast<double>(taken)) +
             " that CUDA, NCCL and the driver take on " + cluster.name,
         "give more, such as " + human_bytes(static_cast<double>(cluster.memory.value)) + " of " +
             cluster.gpu);
  cluster.memory.value = *given, cluster.usable_memory.value = *given - taken;
  return cluster;
}

struct Length {
  double tokens = 0;
  // The FLOPs of --compute, from which the tokens follow; 0: they were given.
  double compute = 0;
};

// Tokens of the run: --tokens, --compute, or those of the recipe. nullopt: they are not known.
std::optional<Length> length_of_run(const Arguments& args, const config::Config& config,
                                    const planner::RunShape& shape) {
  if (args.has("tokens") && args.has("compute"))
    fail(ErrorCode::usage, "--tokens and --compute exclude each other");
  if (const auto flops = args.number("compute", 0, 1e32, true)) {
    const double tokens = planner::tokens_of_compute(shape, *flops);
    if (tokens < 1)
      fail(ErrorCode::usage, "--compute " + *args.value("compute") + " is less than one token takes, " +
                                 human_flop(*flops / tokens));
    return Length{tokens, *flops};
  }
  if (const auto text = args.value("tokens")) {
    config::TextProblem problem;
    const auto tokens = config::integer_from_text(*text, config::NumberForm::count, problem);
    if (!tokens) fail(ErrorCode::usage, "--tokens " + *text + " " + problem.message, problem.help);
    if (*tokens <= 0) fail(ErrorCode::usage, "--tokens " + *text + " is not above 0");
    return Length{planner::real(*tokens)};
  }
  if (config.train.train_iters)
    return Length{planner::real(*config.train.train_iters) * planner::real(shape.tokens_per_step())};
  if (config.train.train_samples)
    return Length{planner::real(*config.train.train_samples) * planner::real(shape.seq)};
  return std::nullopt;
}

planner::Resolver resolver(Context& context, const std::string& recipe, std::optional<int64_t> gpus) {
  return [&context, recipe, gpus](const std::vector<std::string>& overrides) {
    return resolve_with(context, recipe, gpus, overrides);
  };
}

// The recipe to search from. Its own layout need not divide the number of GPUs, nor the batch: then all but
// the layout is that of the recipe on its own GPUs, or on one.
config::Resolution search_base(Context& context, const std::string& recipe, std::optional<int64_t> gpus) {
  config::Resolution resolution = resolve_recipe(context, recipe, gpus);
  if (resolution.ok()) return resolution;
  const config::DistConfig dist = resolution.config.dist;
  auto other = resolve_with(context, recipe, std::nullopt, {});
  if (!other)
    other = resolve_with(context, recipe, 1,
                         {"dist.tp=1", "dist.sp=false", "dist.pp=1", "dist.vpp=null", "dist.cp=1",
                          "dist.ep=1", "dist.etp=null"});
  if (!other) return require_recipe(context, recipe);
  resolution.config = *other;
  resolution.config.dist = dist;
  return resolution;
}

// That no layout divides the GPUs and the batch, with the nearest batches that one divides.
[[noreturn]] void fail_indivisible(const config::Config& config, const std::vector<int64_t>& batches) {
  std::string nearest;
  for (const int64_t batch : batches) nearest += (nearest.empty() ? "" : " or ") + std::to_string(batch);
  fail(ErrorCode::config,
       "no layout divides the heads and layers of the model and a batch of " +
           counted(config::full_batch_size(config), "sample") + " over " +
           counted(config.dist.world_size, "GPU"),
       nearest.empty() ? "use another number of GPUs"
                       : "use another number of GPUs, or the nearest batch that can be divided: "
                         "train.global_batch_size=" +
                             nearest);
}

int run_search(Context& context, const std::string& recipe, std::optional<int64_t> gpus,
               const planner::Cluster& cluster) {
  const config::Resolution resolution = search_base(context, recipe, gpus);
  const planner::SearchResult result =
      planner::search_layouts(resolution.config, cluster, resolver(context, recipe, gpus));
  if (result.tried == 0) fail_indivisible(resolution.config, result.batches);
  put(context.args.has("json") ? dump_json(search_json(resolution.recipe_name, cluster, result), 2) + "\n"
                               : search_text(resolution.recipe_name, cluster, result));
  if (result.layouts.empty())
    fail(ErrorCode::no_fit, "no layout was found that fits", "use more GPUs, or GPUs with more memory");
  return 0;
}

// Writes the files of --trace and --svg, and returns the text of --timeline.
std::string show_timeline(const Arguments& args, const planner::Plan& plan,
                          const planner::Timeline& timeline) {
  if (const auto file = args.value("trace")) write_file_durably(*file, timeline_trace(timeline));
  if (const auto file = args.value("svg")) write_file_durably(*file, timeline_svg(timeline));
  return args.has("timeline") ? timeline_text(plan, timeline, std::max<int64_t>(40, terminal_columns() - 10))
                              : "";
}

// Options of a plan that a search does not have, and files that are no earlier output.
void check_options(const Arguments& args) {
  if (args.has("gpus") && args.has("ranks"))
    fail(ErrorCode::usage, "--gpus and --ranks are the same: give one of them");
  if (args.has("search"))
    for (const char* other :
         {"memory", "tokens", "compute", "price-per-gpu-hour", "timeline", "trace", "svg", "html"})
      if (args.has(other))
        fail(ErrorCode::usage, "--search and --" + std::string(other) + " exclude each other");
  if (args.has("json") && args.has("timeline"))
    fail(ErrorCode::usage, "--json and --timeline exclude each other",
         "--trace FILE writes the timeline as JSON");
  if (const auto file = args.value("trace")) refuse_other_content(*file, "{");
  if (const auto file = args.value("html")) refuse_other_content(*file, "<!doctype html");
  if (const auto file = args.value("svg")) refuse_other_content(*file, "<svg");
}

int run_plan(Context& context) {
  const Arguments& args = context.args;
  const std::string& recipe = args.word(0, "RECIPE");
  check_options(args);
  const auto gpus = args.has("gpus") ? args.integer("gpus", 1, 1 << 24) : ranks_argument(context);
  const planner::Cluster cluster = cluster_argument(args);
  if (args.has("search")) return run_search(context, recipe, gpus, cluster);
  const config::Resolution resolution = require_recipe(context, recipe, gpus);
  const planner::Plan plan = planner::make_plan(resolution.config, cluster, memory_choice(args));
  const planner::Resolver resolve = resolver(context, recipe, gpus);
  const std::vector<planner::Change> changes =
      plan.fits ? planner::faster_changes(plan, resolve) : planner::ways_to_fit(plan, resolve);
  const auto length = length_of_run(args, resolution.config, plan.shape);
  std::optional<planner::RunBudget> budget;
  if (length && length->tokens > 0)
    budget = planner::run_budget(plan.shape, plan.cluster, plan.time.seconds, length->tokens,
                                 {.every = resolution.config.checkpoint.save_interval,
                                  .asynchronous = resolution.config.checkpoint.async_save,
                                  .optimizer = resolution.config.checkpoint.save_optim});
  OrderedJson json = plan_json(resolution.recipe_name, plan, changes);
  if (budget) json["run"] = budget_json(*budget);
  std::optional<planner::Timeline> timeline;
  for (const char* flag : {"timeline", "trace", "svg", "html"})
    if (args.has(flag) && !timeline)
      timeline = planner::simulate_timeline(plan.shape, plan.cluster, plan.time);
  const std::string diagram = timeline ? show_timeline(args, plan, *timeline) : "";
  if (const auto file = args.value("html")) {
    const planner::SearchResult found = planner::search_layouts(resolution.config, cluster, resolve);
    write_file_durably(
        *file, plan_page_html({title_text(resolution.recipe_name, plan), layout_text(plan.shape), json,
                               search_json(resolution.recipe_name, cluster, found), links_json(plan),
                               budget ? budget_json(*budget) : OrderedJson(), timeline_svg(*timeline)}));
  }
  put(args.has("json") ? dump_json(json, 2) + "\n"
                       : plan_text(resolution.recipe_name, plan, changes) + diagram +
                             (budget ? budget_text(plan.shape, plan.cluster, *budget, length->compute) : ""));
  if (!plan.fits)
    fail(ErrorCode::no_fit, "the run does not fit: " + plan.limits.front(), no_fit_help(changes));
  return 0;
}

}  // namespace

const Command kPlan = {
    .name = "plan",
    .purpose = "estimate memory, speed and limits of a run on GPUs that need not be there",
    .usage = "RECIPE [a.b=c …] [flags]",
    .examples = {{"plan llama3-70b", "on its own number of H100 GPUs"},
                 {"plan llama3-70b --gpus 512 --cluster gb200", "on others"},
                 {"plan llama3-8b train.micro_batch_size=2 --cluster h200", "another micro-batch"},
                 {"plan llama3-70b --gpus 512 --search", "the fastest layouts that fit"},
                 {"plan llama3-8b --gpu-memory 96GB", "on GPUs with another memory"},
                 {"plan llama3-70b --tokens 15T --price-per-gpu-hour 2.5", "days, failures, energy, cost"},
                 {"plan llama3-70b --timeline --svg step.svg", "the pipeline of a step"},
                 {"plan llama3-70b --html plan.html", "a page to look at"},
                 {"plan llama3-8b --json", "for scripts"}},
    .options =
        {{"gpus", 0, "N", "the world size, instead of the recipe's"},
         {"ranks", 0, "N", "the same as --gpus"},
         {"cluster", 0, "CLUSTER",
          "the GPUs: a preset (capstan recipe ls cluster) or a file with its fields; default h100"},
         {"gpu-memory", 0, "SIZE", "the memory of one GPU, such as 40GB, instead of the cluster's"},
         {"memory", 0, "KIND",
          "how memory is found: auto (default), exact (the trainer's step on the meta device) or formula", "",
          "auto exact formula"},
         {"tokens", 0, "N", "length of the run, such as 15T, instead of the recipe's: days, energy, cost"},
         {"compute", 0, "FLOP", "length of the run by a compute budget, such as 1e24"},
         {"price-per-gpu-hour", 0, "PRICE", "price of one GPU for an hour, in any currency"},
         {"timeline", 0, "", "draw the pipeline of a step, and print the bytes of a step by link"},
         {"trace", 0, "FILE", "write the pipeline of a step for chrome://tracing and ui.perfetto.dev"},
         {"svg", 0, "FILE", "write the pipeline of a step as a picture"},
         {"html", 0, "FILE",
          "write a page: whether it fits, memory, pipeline, Pareto front of a search, changes"},
         {"search", 0, "", "find the fastest layouts that fit, and print their overrides"},
         {"json", 0, "", "print one JSON object"}},
    .details =
        "Exit code 0: the run fits; 3: it does not, and the message proposes overrides that fit.\n"
        "Times come from formulas with published figures of the GPUs, as a range; no GPU is used, and "
        "nothing\n"
        "is measured. `capstan help planning` explains the figures and how far they were off.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_plan,
};

}  // namespace capstan::cli
