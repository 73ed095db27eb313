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
  // The hash of the configuration.
  std::string id;
  // Indices of the finished trials in the plan; never empty.
  std::vector<size_t> trials;
  // Number of trials of the configuration.
  int64_t planned = 0;
  // Statistics over `trials`.
  SeedStatistics metric;
};
// Returns nullopt if no trial has a result.
std::optional<BestConfiguration> best_configuration(const Results& results);

// Renders the report page. The more curves there are, the fewer points each one keeps, so that the page stays
// under 5 MB up to some ten thousand trials. `recipe`: text of the recipe of the best configuration's first
// finished trial. `shown`: name of the sweep's directory in commands.
std::string report_html(const Results& results, const std::string& recipe, const std::string& shown);

// Renders the report page with the recipe read from the sweep's directory.
std::string report_html(const Results& results, const std::filesystem::path& directory);

}  // namespace capstan::sweep
