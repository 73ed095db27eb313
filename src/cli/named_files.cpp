#include "cli/named_files.hpp"

#include "train/trainer/inputs.hpp"

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
  for (const train::MissingFile& file :
       train::unusable_files(config, train::missing_files(config),
                             level == config::Level::error ? Inspection::full : Inspection::quick))
    found.push_back(diagnostic(resolution, level, "C0802", "unusable_file", file));
  return found;
}

}  // namespace capstan::cli
