// Composes one point of a sweep as a recipe: checks and estimates it, and hashes its meaning for its id.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "sweep/plan.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::sweep {

struct ComposedTrial {
  bool valid = false;
  // Interval of validation. nullopt: the trial does not validate.
  std::optional<int64_t> eval_interval;
  // `reasons` are the errors of the recipe; `warnings` are those of the rules, and hidden presets.
  std::vector<std::string> reasons, warnings;
  // Why the number of steps is not known. Empty: it is known.
  std::string unknown_length;
  // The trial without id, configuration and label.
  TrialPlan trial;
  // The canonical form from which the hash of the trial is computed.
  std::string form;
  TrialFiles files;
};

class Composer {
 public:
  // Throws ErrorCode::config or ::not_found if the base recipe cannot be read.
  explicit Composer(const Definition& definition);
  ComposedTrial compose(const Values& values, std::optional<int64_t> seed);
  // Returns the canonical form of the recipe that a trial has on disk, as this version reads it. Throws
  // ErrorCode::config with the errors of the recipe.
  std::string stored_form(const std::filesystem::path& recipe) const;
  const std::string& base_hash() const { return base_hash_; }

 private:
  config::Request request_for(std::string recipe) const;
  config::Resolution resolve(const Values& values, std::optional<int64_t> seed) const;
  TrialEstimate estimate(const config::Config& config, int64_t resident_data, std::string& why_unknown);
  // train::resident_data(), once for all trials whose data take the same memory.
  const train::ResidentData& resident_data(const config::Config& config);
  std::optional<int64_t> steps_of(const config::Config& config, std::string& why_unknown);
  // Whether trials that differ in a field alone are different trials.
  bool counts(const config::FieldInfo& field) const;
  // The fields from which a trial's id is computed.
  std::string form_of(const config::Config& config, bool with_seed = true) const;

  const Definition& definition_;
  // Paths of the section `validation` that the sweep varies.
  std::set<std::string, std::less<>> varied_validation_;
  std::string base_hash_;
  // FLOPs and memory, keyed by the settings on which they depend.
  std::map<std::string, std::pair<double, int64_t>> estimates_;
  // Memory of the data, keyed likewise.
  std::map<std::string, train::ResidentData> data_;
  // Lengths of recipes with train.epochs: the number of steps, or why it is not known.
  std::map<std::string, std::pair<std::optional<int64_t>, std::string>> lengths_;
};

}  // namespace capstan::sweep
