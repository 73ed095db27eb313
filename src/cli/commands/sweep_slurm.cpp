// capstan sweep slurm

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/terminal.hpp"
#include "sweep/slurm.hpp"

namespace capstan::cli {

namespace {

const char* origin_text(sweep::SlurmPlan::LimitOrigin origin) {
  using Origin = sweep::SlurmPlan::LimitOrigin;
  switch (origin) {
    case Origin::options:
      return "--array-max";
    case Origin::cluster:
      return "the cluster's file";
    case Origin::scontrol:
      return "scontrol";
    case Origin::slurm_default:
      return "the usual limit";
  }
  return "";
}

int run_sweep_slurm(Context& context) {
  const Arguments& args = context.args;
  const std::string& directory = args.word(0, "DIR");
  sweep::SlurmOptions options;
  options.program = own_path();
  if (const auto file = args.value("cluster")) options.cluster = sweep::read_cluster(*file);
  const sweep::Store store(directory);
  options.array_max = args.integer("array-max", 1);
  options.max_parallel = args.integer("max-parallel", 1);
  const sweep::SlurmPlan plan = sweep::write_slurm(store, options);
  const bool submit = args.has("submit"), json = args.has("json");
  OrderedJson arrays = OrderedJson::array();
  size_t trials = 0;
  for (size_t i = 0; i < plan.arrays.size(); ++i) {
    const sweep::SlurmArray& array = plan.arrays[i];
    trials += array.tasks.size();
    std::string job;
    if (submit) job = sweep::submit_slurm(store, plan, i);
    if (json)
      arrays.push_back({{"array", array.number},
                        {"script", plan.scripts[i]},
                        {"ranks", array.ranks},
                        {"tasks", array.tasks},
                        {"command", plan.commands[i]},
                        {"job", submit ? OrderedJson(job) : OrderedJson(nullptr)}});
    else
      put(submit ? "job " + job + ": " + plan.scripts[i] + "\n" : command_text(plan.commands[i]) + "\n");
  }
  if (json) {
    put(dump_json(
            OrderedJson{{"schema", "capstan.sweep-slurm/1"}, {"arrays", arrays}, {"queued", plan.queued}},
            2) +
        "\n");
    return 0;
  }
  if (context.quiet()) return 0;
  const std::string queued =
      plan.queued ? ", " + std::to_string(plan.queued) + " are in the queue already" : "";
  if (plan.arrays.empty())
    print_stderr("nothing to submit: no trial is pending" + queued + "\n");
  else
    print_stderr(
        std::to_string(trials) + (trials == 1 ? " trial in " : " trials in ") +
        counted(plan.arrays.size(), "array") + " of at most " + std::to_string(plan.limit) + " (" +
        origin_text(plan.limit_origin) + ")" + queued + "\n" +
        (submit ? ""
                : "run the commands above, or add --submit; `capstan sweep status` shows the progress\n"));
  return 0;
}

}  // namespace

const Command kSweepSlurm = {
    .name = "sweep slurm",
    .purpose = "write Slurm job arrays for the pending trials",
    .usage = "DIR [--cluster FILE] [--array-max N] [--max-parallel N] [--submit]",
    .examples = {{"sweep slurm sweeps/lr", "writes scripts, prints the sbatch commands"},
                 {"sweep slurm sweeps/lr --cluster cluster.yaml --max-parallel 8 --submit",
                  "and submits them"}},
    .options = {{"cluster", 0, "FILE", "cluster file: partition, account, time …"},
                {"array-max", 0, "N", "trials in one array; default: the limit of scontrol, else 1000"},
                {"max-parallel", 0, "N", "tasks of an array that run at the same time"},
                {"submit", 0, "", "call sbatch"},
                {"json", 0, "", "print one JSON object"}},
    .details =
        "Writes one array for each set of resources to DIR/slurm. A task runs one trial; before its time "
        "limit it saves,\n"
        "is requeued and resumes from its checkpoint. `capstan help sweeps` describes the cluster file.\n",
    .max_words = 1,
    .run = run_sweep_slurm,
};

}  // namespace capstan::cli
