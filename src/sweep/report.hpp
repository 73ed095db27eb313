// A sweep as one HTML page that needs nothing else: curves, the metric against each axis, parallel coordinates, the best
// trial with its recipe, what each axis explains, and the table. Drawn by the page's own script (report/).
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "sweep/results.hpp"

namespace capstan::sweep {

// The finished trial with the best metric; nullopt: none.
std::optional<size_t> best_trial(const Results& results);

// Curves are thinned, the more the more there are: the page stays under 5 MB up to some ten thousand trials. `recipe`: text of the best trial's; `shown`: how the
// sweep's directory is called in commands.
std::string report_html(const Results& results, const std::string& recipe, const std::string& shown);

// The recipe read from the sweep's directory.
std::string report_html(const Results& results, const std::filesystem::path& directory);

}  // namespace capstan::sweep
