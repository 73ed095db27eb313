// Composes one point of a sweep as a recipe: checks and estimates it, and hashes its meaning for its id.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "config/core/resolve.hpp"
#include "sweep/plan.hpp"

namespace capstan::sweep {

struct ComposedTrial {
  bool valid = false;
  std::optional<int64_t> eval_interval;        // nullopt: it does not validate
  std::vector<std::string> reasons, warnings;  // of errors; of lints, and hidden presets
  std::string unknown_length;                  // why the number of steps is not known; empty: it is
  TrialPlan trial;                             // without id, configuration and label
  std::string form;                            // the canonical form that its hash is of
  TrialFiles files;
};

class Composer {
 public:
  // Throws ErrorCode::config or ::not_found where the base itself cannot be read.
  explicit Composer(const Definition& definition);
  ComposedTrial compose(const Values& values, std::optional<int64_t> seed);
  // The canonical form of the recipe that a trial has on disk, as this version reads it. Throws
  // ErrorCode::config with its errors.
  std::string stored_form(const std::filesystem::path& recipe) const;
  const std::string& base_hash() const { return base_hash_; }

 private:
  config::Request request_for(std::string recipe) const;
  config::Resolution resolve(const Values& values, std::optional<int64_t> seed) const;
  TrialEstimate estimate(const config::Config& config, std::string& why_unknown);
  std::optional<int64_t> steps_of(const config::Config& config, std::string& why_unknown);
  // Whether trials that differ in a field alone are different trials.
  bool counts(const config::FieldInfo& field) const;
  // What a trial is named by: the fields that count.
  std::string form_of(const config::Config& config, bool with_seed = true) const;

  const Definition& definition_;
  std::set<std::string, std::less<>> varied_validation_;  // paths
  std::string base_hash_;
  std::map<std::string, std::pair<double, int64_t>> estimates_;  // by what they depend on
  // Of recipes whose length is train.epochs: steps, or why they are not known.
  std::map<std::string, std::pair<std::optional<int64_t>, std::string>> lengths_;
};

}  // namespace capstan::sweep
