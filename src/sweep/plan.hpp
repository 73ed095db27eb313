// The trials of a definition: composed, checked and estimated before anything is written; frozen in
// plan.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "sweep/definition.hpp"

namespace capstan::sweep {

inline constexpr std::string_view kPlanSchema = "capstan.sweep-plan/1";

struct TrialEstimate {
  // nullopt: train.epochs gives the length, and the data cannot be read where the sweep is planned. Tokens
  // and flops are 0 then.
  std::optional<int64_t> steps;
  int64_t tokens = 0;
  // Sum over all ranks and steps.
  double flops = 0;
  // Peak memory of rank 0.
  int64_t memory_bytes = 0;
};

struct TrialPlan {
  // Hash of the trial's resolved configuration (the fields that change results), with at least 8 hexadecimal
  // digits.
  std::string id;
  // The same hash without the seed: equal for trials that differ only in the seed.
  std::string configuration;
  // The full hashes as computed by the version that last wrote the plan; id and configuration stay the same.
  // Empty in plans of earlier builds.
  std::string hash, configuration_hash;
  // Label for display, such as "lr=0.0003,tp=2".
  std::string label;
  // Values of axes and links as the recipe shows them, without the seed.
  Values values;
  std::optional<int64_t> seed;
  int64_t ranks = 1;
  // Number of threads of one rank, if the sweep sets it.
  std::optional<int64_t> threads;
  TrialEstimate estimate;
};

// A point whose recipe has errors.
struct InvalidTrial {
  Values values;
  std::optional<int64_t> seed;
  // "error[R0201]: …", one for each error.
  std::vector<std::string> reasons;
  bool operator==(const InvalidTrial&) const = default;
};

struct Plan {
  std::string name;
  Definition definition;
  // Hash of the base recipe's resolved configuration, with `set`.
  std::string base_hash;
  // Paths that axes and links set, in order, without those that have a single value.
  std::vector<std::string> varying;
  std::vector<TrialPlan> trials;
  std::vector<InvalidTrial> invalid;
  // Number of points left out by `exclude`, and number of points whose configuration is that of another.
  int64_t excluded = 0, duplicates = 0;
  // Finds a trial by a unique beginning of its id. Null: there is none.
  const TrialPlan* find(std::string_view id) const;
  // Throws for an id that find() does not find: ErrorCode::not_found, "not found: trial = ID", with similar
  // ids, or ::usage if several trials begin with it.
  [[noreturn]] void fail_no_trial(std::string_view id) const;
};

// The files of a trial.
struct TrialFiles {
  // A complete recipe that runs by itself. Its first lines, which name the trial, are missing.
  std::string recipe;
  std::string overrides;
};

struct ComposedPlan {
  Plan plan;
  // files[i] belongs to plan.trials[i].
  std::vector<TrialFiles> files;
  // Warnings of the recipes, and how many points of a grid were drawn.
  std::vector<std::string> notes;
};

// Called after each point with the number of composed points and their total.
using PlanProgress = FunctionRef<void(int64_t done, int64_t of)>;

// Throws ErrorCode::config when every trial is invalid, or more than 100 000 points would have to be
// composed.
ComposedPlan make_plan(const Definition& definition, PlanProgress progress);
ComposedPlan make_plan(const Definition& definition);

// Writes DIRECTORY, which must not hold a sweep, with sweep.yaml, plan.json, trials/ID/… and journal.jsonl.
// The directory appears by a rename, complete.
void write_plan(const std::filesystem::path& directory, const ComposedPlan& planned);

// Adds the trials that the directory's plan lacks, and keeps the others with their states. Returns how
// many were added. Throws ErrorCode::config if all added points are invalid, and ::failed if the base
// recipe has changed since, and names the first field that differs. A version with other fields computes
// another hash of the same recipe; then the recipes of the trials are compared as this version reads them.
int64_t extend_plan(const std::filesystem::path& directory, const ComposedPlan& planned);

// Adds one trial from values given by hand (`sweep ask`). It uses the directory's base and `set`, and is
// checked as any other. Throws ErrorCode::config with the reasons. A trial that exists already is returned
// unchanged.
TrialPlan add_trial(const std::filesystem::path& directory, const Values& values,
                    std::optional<int64_t> seed);

// Throws ErrorCode::not_found if there is no sweep, and ::format for a damaged one.
Plan read_plan(const std::filesystem::path& directory);
bool is_sweep(const std::filesystem::path& directory);

}  // namespace capstan::sweep
