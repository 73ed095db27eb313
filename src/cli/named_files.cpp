#include "cli/named_files.hpp"

#include "train/inputs.hpp"

namespace capstan::cli {

std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level) {
  std::vector<config::Diagnostic> found;
  for (const train::MissingFile& missing : train::missing_files(resolution.config)) {
    config::Diagnostic problem;
    problem.level = level;
    problem.code = "C0801";
    problem.name = "missing_file";
    problem.message = missing.message;
    problem.path = missing.field;
    problem.place = resolution.origin(missing.field).place;
    if (!missing.help.empty()) problem.help(missing.help);
    found.push_back(std::move(problem));
  }
  return found;
}

}  // namespace capstan::cli
