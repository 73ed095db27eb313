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
  // nullopt: train.epochs says it, and the data cannot be read where the sweep is planned; then tokens and
  // flops are 0.
  std::optional<int64_t> steps;
  int64_t tokens = 0;
  double flops = 0;          // of all ranks over all steps
  int64_t memory_bytes = 0;  // of rank 0, at its peak
};

struct TrialPlan {
  std::string id;             // at least 8 hex digits: the hash of what the trial means
  std::string configuration;  // likewise, of everything but the seed: equal for replicates
  // In full, as the version computes them that last wrote the plan; id and configuration stay. Empty in plans
  // of earlier builds.
  std::string hash, configuration_hash;
  std::string label;  // "lr=0.0003,tp=2", for display
  Values values;      // of axes and links, as the recipe shows them, without the seed
  std::optional<int64_t> seed;
  int64_t ranks = 1;
  std::optional<int64_t> threads;  // of one rank, where the sweep says so
  TrialEstimate estimate;
};

// A point whose recipe has errors.
struct InvalidTrial {
  Values values;
  std::optional<int64_t> seed;
  std::vector<std::string> reasons;  // "error[R0201]: …", one for each error
  bool operator==(const InvalidTrial&) const = default;
};

struct Plan {
  std::string name;
  Definition definition;
  std::string base_hash;  // of the base recipe's meaning, with `set`
  // Paths that axes and links set, in order; those with one value only left out.
  std::vector<std::string> varying;
  std::vector<TrialPlan> trials;
  std::vector<InvalidTrial> invalid;
  // Points left out by `exclude`; points that mean the same as another.
  int64_t excluded = 0, duplicates = 0;
  const TrialPlan* find(std::string_view id) const;  // a unique beginning of an id is enough; null: none
  // For an id that find() does not find. ErrorCode::not_found, "not found: trial = ID", with near ids;
  // ::usage where several trials begin with it.
  [[noreturn]] void fail_no_trial(std::string_view id) const;
};

// What a trial has on disk.
struct TrialFiles {
  std::string recipe;  // complete, runnable by itself; without its first lines, which name the trial
  std::string overrides;
};

struct ComposedPlan {
  Plan plan;
  std::vector<TrialFiles> files;   // of plan.trials[i]
  std::vector<std::string> notes;  // lints of the recipes, and what was drawn of a grid
};

// Called after each point with the number of composed points and their total.
using PlanProgress = FunctionRef<void(int64_t done, int64_t of)>;

// Throws ErrorCode::config when every trial is invalid, or more than 100 000 points would have to be
// composed.
ComposedPlan make_plan(const Definition& definition, PlanProgress progress);
ComposedPlan make_plan(const Definition& definition);

// Writes DIRECTORY (which must not hold a sweep) with sweep.yaml, plan.json, trials/ID/…, journal.jsonl.
// Appears by rename.
void write_plan(const std::filesystem::path& directory, const ComposedPlan& planned);

// Adds the trials that the directory's plan lacks, and keeps the others with their states. Returns how many
// were added.
// Throws ErrorCode::failed when the base recipe has changed since, with the first field that differs. A
// version with other fields hashes the same recipe otherwise: then the recipes of the trials decide, as this
// version reads them.
int64_t extend_plan(const std::filesystem::path& directory, const ComposedPlan& planned);

// One trial from values given by hand (`sweep ask`): of the directory's base and `set`, checked as any other.
// Throws
// ErrorCode::config with the reasons. A trial that is there already is returned as it is.
TrialPlan add_trial(const std::filesystem::path& directory, const Values& values,
                    std::optional<int64_t> seed);

// Throws ErrorCode::not_found where there is no sweep, ::format for one that is damaged.
Plan read_plan(const std::filesystem::path& directory);
bool is_sweep(const std::filesystem::path& directory);

}  // namespace capstan::sweep
