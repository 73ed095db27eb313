// Runs of the trainer below the command line: recipes resolved as there, what a run reports, and the rows
// that it leaves.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "train/records/metrics.hpp"
#include "train/trainer/progress.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/trainer.hpp"

namespace capstan::testing {

// May have errors. Relative paths are below the recipe's directory.
inline config::Resolution resolve_recipe(const std::filesystem::path& recipe,
                                         const std::vector<std::string>& overrides) {
  config::Request request;
  request.recipe = recipe.string();
  request.directory = recipe.parent_path().string();
  for (const std::string& text : overrides) request.overrides.push_back(config::Override::token(text));
  return config::resolve(request);
}

// `resolution` outlives the options. from_command_line: those of its overrides that the user gives at this
// start.
inline train::RunOptions run_options(const config::Resolution& resolution,
                                     const std::filesystem::path& directory, train::Resume resume,
                                     const std::vector<std::string>& from_command_line = {}) {
  std::vector<config::Override> words;
  for (const std::string& text : from_command_line) words.push_back(config::Override::token(text));
  train::RunOptions options;
  options.run_dir = directory;
  options.resume = resume;
  options.recipe = train::recipe_record(resolution, words, "capstan train");
  options.changes_since = [&](const std::string& stored) { return train::changes_since(stored, resolution); };
  options.measure_rate = false;
  return options;
}

// Collects the reports of a run, without status lines.
struct Report final : train::ProgressSink {
  std::vector<std::string> lines, warnings;
  // Both, in their order.
  std::string all;
  std::function<void(const std::string&)> on_warning = [](const std::string&) {};
  void line(const std::string& text) override {
    lines.push_back(text);
    all += text + "\n";
  }
  void warning(const std::string& text) override {
    warnings.push_back(text);
    all += "warning: " + text + "\n";
    on_warning(text);
  }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }
};

// {step, loss, gradient norm} of every logged step, in the file's order: to be compared bit by bit.
inline std::vector<double> losses_of(const std::filesystem::path& run) {
  std::vector<double> all;
  records::read_metrics(run / "metrics.jsonl", [&](const records::ReadRow& row) {
    if (!row.event.empty()) return;
    all.push_back(static_cast<double>(row.step.value_or(-1)));
    all.push_back(row.number("loss"));
    all.push_back(row.number("grad_norm"));
  });
  return all;
}

}  // namespace capstan::testing
