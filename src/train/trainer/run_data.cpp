#include "train/trainer/run_data.hpp"

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/sections/batch_ramp.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/inputs.hpp"

namespace capstan::train {

int64_t RunData::bytes_in_memory() const {
  std::map<const void*, int64_t> held;
  for (const auto& dataset : datasets)
    if (dataset) dataset->add_memory(held);
  int64_t bytes = 0;
  for (const auto& [object, size] : held) bytes += size;
  return bytes;
}

RunData open_run_data(config::Config& config, bool resumes, RunLog& log) {
  require_files(missing_files(config, resumes));
  RunData data;
  // Mock data needs no tokenizer, and the contents of a checkpoint do not depend on whether its files happen
  // to exist.
  if (config.dataset.kind != config::DatasetKind::mock) data.tokenizer = load_tokenizer(config);
  data.datasets = open_datasets(config, data.tokenizer.get());
  if (!data.training())
    fail(ErrorCode::config, "dataset.split gives the training data no share", "dataset.split=969,30,1");
  data.fingerprint = data.training()->fingerprint();
  if (config.train.epochs && !config.train.train_iters)
    config.train.train_iters = steps_of_epochs(config, *data.training());
  const char* const splits[] = {"training", "validation", "test"};
  for (size_t split = 0; split < 3; ++split) {
    const auto& dataset = data.datasets[split];
    if (!dataset) continue;
    if (const std::string summary = dataset->summary(); !summary.empty())
      log.line(std::string(splits[split]) + " data: " + summary);
    for (const std::string& warning : dataset->warnings())
      log.warning(std::string(splits[split]) + " data: " + warning);
  }
  return data;
}

void report_epochs(const config::Config& config, const data::Dataset& training, int64_t steps, RunLog& log) {
  constexpr double kMany = 20;
  const config::BatchRamp ramp(config.train);
  const int64_t samples = ramp.samples_of(steps);
  const auto most = data::most_passes(training, samples);
  if (!most) return;
  const std::string passes = fixed(most->count, most->count < 10 ? 2 : 1) + " passes over ";
  const bool blend = training.parts().size() > 1;
  const std::string what = blend ? "`" + most->part.name + "`, the part of the blend that is repeated most"
                                 : std::string("the training data");
  log.line(with_separators(steps) + " steps of " +
           (ramp.grows() ? with_separators(ramp.size_at(0)) + " to " : "") +
           with_separators(*config.train.global_batch_size) + " samples make " + passes + what + " (" +
           with_separators(most->part.epoch_samples) + " samples of " +
           std::to_string(training.sequence_length()) + " tokens)");
  if (most->count > kMany)
    log.warning("the run makes " + passes + what +
                ": above about 20 passes a model overfits; shorten the run or add data");
}

std::string data_text(const config::DatasetConfig& config, const data::Dataset& training) {
  if (config.kind == config::DatasetKind::mock) return "mock data";
  std::vector<std::string> names;
  for (const config::Path& path : config.data_path) names.push_back(path.text);
  for (const auto& blend : {config.blend, config.train_blend})
    for (const auto& [prefix, weight] : blend) names.push_back(prefix);
  for (const config::Path& path : config.train_files) names.push_back(path.text);
  const std::string summary = training.summary();
  return std::string(config::enum_name(config.kind)) + " " + join(names, ", ") + ": " +
         (summary.empty() ? std::to_string(training.epoch_samples()) + " samples a pass" : summary);
}

}  // namespace capstan::train
