#include "cli/named_files.hpp"

#include "train/trainer/inputs.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::cli {

namespace {

config::Diagnostic diagnostic(const config::Resolution& resolution, config::Level level, const char* code,
                              const char* name, const train::MissingFile& file) {
  config::Diagnostic problem;
  problem.level = level;
  problem.code = code;
  problem.name = name;
  problem.message = file.message;
  problem.path = file.field;
  problem.location = resolution.origin(file.field).location;
  if (!file.help.empty()) problem.help(file.help);
  return problem;
}

// Options with which `train` would start a new run.
train::RunOptions new_run(const config::Resolution& resolution, const std::filesystem::path& run_dir) {
  train::RunOptions options;
  options.run_dir = run_dir;
  options.recipe = train::recipe_record(resolution, {}, {});
  options.changes_since = [&resolution](const std::string& stored) {
    return train::changes_since(stored, resolution);
  };
  return options;
}

}  // namespace

std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level) {
  std::vector<config::Diagnostic> found;
  for (const train::MissingFile& missing : train::missing_files(resolution.config))
    found.push_back(diagnostic(resolution, level, "C0801", "missing_file", missing));
  return found;
}

std::vector<config::Diagnostic> unusable_files(const config::Resolution& resolution, config::Level level) {
  using train::Inspection;
  std::vector<config::Diagnostic> found;
  const config::Config& config = resolution.config;
  const bool all = level == config::Level::error;
  const train::RunOptions options = all ? new_run(resolution, {}) : train::RunOptions();
  for (const train::MissingFile& file : train::unusable_files(
           config, train::missing_files(config), all ? Inspection::full : Inspection::quick, options))
    found.push_back(diagnostic(resolution, level, "C0802", "unusable_file", file));
  return found;
}

std::vector<config::Diagnostic> unwritable_directories(const config::Resolution& resolution,
                                                       const std::filesystem::path& run_dir) {
  std::vector<config::Diagnostic> found;
  for (const train::MissingFile& directory :
       train::unwritable_directories(resolution.config, new_run(resolution, run_dir)))
    found.push_back(diagnostic(resolution, config::Level::error, "C0803", "unwritable_directory", directory));
  return found;
}

}  // namespace capstan::cli
