// A sweep as one HTML page that needs nothing else: curves, the metric against each axis, parallel
// coordinates, the best configuration with its recipe, what each axis explains, and the table. Drawn by the
// page's own script (report/).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sweep/results.hpp"

namespace capstan::sweep {

// The configuration with the best mean of the metric over the seeds that have finished.
struct BestConfiguration {
  std::string id;              // the hash of the configuration
  std::vector<size_t> trials;  // the finished ones, indices into the plan; not empty
  int64_t planned = 0;         // trials that the configuration has
  SeedStatistics metric;       // over `trials`
};
// nullopt: no trial has a result.
std::optional<BestConfiguration> best_configuration(const Results& results);

// Curves are thinned, the more the more there are: the page stays under 5 MB up to some ten thousand trials.
// `recipe`: text of the recipe of the best configuration's first finished trial; `shown`: how the sweep's
// directory is called in commands.
std::string report_html(const Results& results, const std::string& recipe, const std::string& shown);

// The recipe read from the sweep's directory.
std::string report_html(const Results& results, const std::filesystem::path& directory);

}  // namespace capstan::sweep
