#include "cli/named_files.hpp"

#include "base/error.hpp"
#include "cli/report.hpp"
#include "train/records/run_dir.hpp"
#include "train/records/run_list.hpp"
#include "train/trainer/checkpoint_root.hpp"
#include "train/trainer/inputs.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/run_recorder.hpp"

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
  problem.help(with_flags(file.help));
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

std::vector<config::Diagnostic> unusable_files(const config::Resolution& resolution, config::Level level,
                                               int64_t& resident_data) {
  using train::Inspection;
  std::vector<config::Diagnostic> found;
  const config::Config& config = resolution.config;
  const bool all = level == config::Level::error;
  const train::RunOptions options = all ? new_run(resolution, {}) : train::RunOptions();
  train::OpenedFiles opened;
  for (const train::MissingFile& file :
       train::unusable_files(config, train::missing_files(config), all ? Inspection::full : Inspection::quick,
                             options, &opened))
    found.push_back(diagnostic(resolution, level, "C0802", "unusable_file", file));
  for (const train::MissingFile& warning : opened.warnings)
    found.push_back(diagnostic(resolution, config::Level::warning, "C0806", "start_warning", warning));
  resident_data = opened.resident_data;
  return found;
}

std::vector<config::Diagnostic> unusable_name(const config::Resolution& resolution) {
  try {
    (void)train::run_directory(new_run(resolution, {}));
    return {};
  } catch (const Error& error) {
    const train::MissingFile name{"name", resolution.recipe_name, error.message(), error.marked_help()};
    return {diagnostic(resolution, config::Level::error, "C0803", "unwritable_directory", name)};
  }
}

std::vector<config::Diagnostic> unwritable_directories(const config::Resolution& resolution,
                                                       const std::filesystem::path& run_dir) {
  std::vector<config::Diagnostic> found;
  for (const train::MissingFile& directory :
       train::unwritable_directories(resolution.config, new_run(resolution, run_dir)))
    found.push_back(diagnostic(resolution, config::Level::error, "C0803", "unwritable_directory", directory));
  return found;
}

std::vector<config::Diagnostic> occupied_directories(const config::Resolution& resolution,
                                                     const std::filesystem::path& run_dir) {
  std::vector<config::Diagnostic> found;
  const auto add = [&](config::Level level, const train::MissingFile& directory) {
    found.push_back(diagnostic(resolution, level, "C0804", "occupied_directory", directory));
  };
  std::string id;
  const auto refused = [&](const char* field, const Error& error) {
    // Other errors are those of unwritable_directories().
    if (error.code() == ErrorCode::failed)
      add(config::Level::error, {field, "", error.message(), error.marked_help()});
  };
  try {
    const std::filesystem::path run = train::run_directory(new_run(resolution, run_dir));
    std::error_code unknown;
    if (std::filesystem::is_directory(run, unknown)) records::require_run_or_empty(run);
    if (records::is_run(run)) {
      const records::RunSummary summary = records::summarize(run);
      id = summary.file.id;
      add(config::Level::note,
          {"name", run.string(),
           "run `" + run.string() + "` exists already (" + std::string(records::name_of(summary.state)) +
               (summary.step ? " at step " + std::to_string(*summary.step) : "") + ")",
           "`train --resume` continues it; --run-dir DIR names another one"});
    }
  } catch (const Error& error) {
    refused("name", error);
  }
  try {
    train::require_own_checkpoints(resolution.config, id);
  } catch (const Error& error) {
    refused("checkpoint.save", error);
  }
  return found;
}

}  // namespace capstan::cli
