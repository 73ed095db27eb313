#include "sweep/cluster.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/core/field.hpp"
#include "config/resolve/resolve.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

namespace {

using config::RuleReport;
using config::Schema;
using config::Section;

void describe_cluster(Section<Cluster>& s) {
  s.doc("options of batch scripts on a cluster");
  s.field("partition", &Cluster::partition).doc("--partition");
  s.field("account", &Cluster::account).doc("--account");
  s.field("qos", &Cluster::qos).doc("--qos");
  s.field("constraint", &Cluster::constraint).doc("--constraint");
  s.field("reservation", &Cluster::reservation).doc("--reservation");
  s.field("memory", &Cluster::memory).doc("--mem: memory of a node").example("64G");
  s.field("mpi", &Cluster::mpi)
      .doc("MPI plugin of srun for the ranks of a trial: SLURM_MPI_TYPE")
      .example("pmix");
  s.field("time", &Cluster::time).doc("--time of one task; null: the sweep's limits.per_trial").example("4h");
  s.field("cpus_per_rank", &Cluster::cpus_per_rank)
      .doc("--cpus-per-task, if the sweep does not set threads")
      .min(1);
  s.field("gpus_per_rank", &Cluster::gpus_per_rank).doc("--gpus-per-task").min(1);
  s.field("ranks_per_node", &Cluster::ranks_per_node).doc("upper limit of --ntasks-per-node").min(1);
  s.field("array_max", &Cluster::array_max).doc("trials in one array; null: the limit of scontrol").min(1);
  s.field("max_parallel", &Cluster::max_parallel).doc("tasks of an array that run at the same time").min(1);
  s.field("signal_seconds", &Cluster::signal_seconds)
      .doc("seconds before its time limit at which a task saves and is requeued")
      .unit("s")
      .range(1, 65535);
  s.field("max_requeues", &Cluster::max_requeues)
      .doc("maximum number of times that a task is requeued")
      .min(0);
  s.field("sbatch", &Cluster::sbatch)
      .doc("further options of sbatch")
      .example("[--mail-type=FAIL, --exclusive]");
  s.field("setup", &Cluster::setup).doc("lines of shell before the trial").example("[module load openmpi]");
}

bool one_line(std::string_view text) {
  return std::none_of(text.begin(), text.end(), [](char c) { return is_control(c) && c != '\t'; });
}

void check_lines(const Cluster& cluster, RuleReport& report) {
  for (const auto* value : {&cluster.partition, &cluster.account, &cluster.qos, &cluster.constraint,
                            &cluster.reservation, &cluster.memory, &cluster.mpi})
    if (*value &&
        (!one_line(**value) || (*value)->find_first_of(" \t\"'") != std::string::npos || (*value)->empty()))
      report.error("`" + **value + "` must be one line without blanks and quotes, as an option of sbatch");
  for (const std::string& option : cluster.sbatch)
    if (!option.starts_with("--") || !one_line(option))
      report.error("`" + option + "` in `sbatch` is not of the form --name or --name=value");
  for (const std::string& line : cluster.setup)
    if (!one_line(line)) report.error("an item of `setup` has more than one line");
}

const Schema& cluster_schema() {
  static const Schema* const schema = [] {
    auto* made = new Schema;
    made->root<Cluster>(describe_cluster);
    made->rule<Cluster>(
        {"L0001",
         "cluster_lines",
         "each value that goes into a batch script is one line",
         {"partition", "account", "qos", "constraint", "reservation", "memory", "mpi", "sbatch", "setup"}},
        check_lines);
    made->finish();
    return made;
  }();
  return *schema;
}

}  // namespace

Cluster read_cluster(const std::string& file) {
  Cluster cluster;
  config::Request request;
  // A name without a slash names a file, not a shipped recipe.
  request.recipe = file.find('/') == std::string::npos ? "./" + file : file;
  const config::Resolved resolved =
      config::resolve_into(cluster_schema(), config::Library({}, {}), &cluster, request);
  if (!resolved.ok())
    fail(resolved.malformed ? ErrorCode::format : ErrorCode::config,
         "the cluster file has errors" + errors_text(resolved.diagnostics, resolved.sources));
  return cluster;
}

}  // namespace capstan::sweep
