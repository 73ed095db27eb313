// Texts that several sweep commands print, and the trials that their arguments name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "sweep/plan.hpp"

namespace capstan::cli {

// A metric with five significant digits; "-" for nullopt.
std::string metric_text(const std::optional<double>& value);

// A number of steps; "?" for nullopt.
std::string step_count_text(std::optional<int64_t> steps);

// The invalid trials of a plan with their reasons.
OrderedJson invalid_json(const sweep::Plan& plan);

// Prints the invalid trials of a plan, each reason once below the trials that have it.
void show_invalid(const sweep::Plan& plan);

// The ids of the trials that the words name: ids, beginnings of ids, and hashes of configurations, which name
// the trials of all their seeds. Throws an error for a word that names no trial.
std::vector<std::string> trial_ids(const sweep::Plan& plan, const std::vector<std::string>& words);

}  // namespace capstan::cli
