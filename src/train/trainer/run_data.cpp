#include "train/trainer/run_data.hpp"

#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/data_sources.hpp"
#include "data/blend.hpp"
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

static std::optional<data::TokenizerRecord> tokenizer_record_of(const config::Config& config,
                                                                const text::Tokenizer* tokenizer) {
  if (tokenizer) return data::record_of(*tokenizer, tokenizer_name(config.tokenizer));
  if (config.dataset.kind != config::DatasetKind::gpt) return std::nullopt;
  // Datasets of several tokenizers have been refused.
  const config::DataSources sources = config::data_sources(config.dataset);
  for (const auto& source : sources.splits[0]) {
    const std::string path = data::meta_path(source.prefix);
    std::error_code unknown;
    if (std::filesystem::exists(path, unknown)) return data::parse_meta(read_file(path), path).tokenizer;
  }
  return std::nullopt;
}

// Part of the training data is not trained on where nothing evaluates it either. Empty: all of it is used.
static std::string unused_shares(const config::Config& config) {
  const config::DatasetConfig& d = config.dataset;
  if (config.validation.eval_interval || d.kind == config::DatasetKind::mock) return "";
  const bool divided = d.kind == config::DatasetKind::sft ? d.valid_files.empty() && d.test_files.empty()
                                                          : config::data_sources(d).shares.has_value();
  const std::string split = d.split.value_or(data::SftOptions{}.split);
  const auto training = data::parse_split(split)[0];
  if (!divided || !training || training->second - training->first >= 1) return "";
  return "the training data is " + fixed(100 * (training->second - training->first), 1) +
         " % of the files (dataset.split " + split +
         "); without validation.eval_interval the rest is not used, and dataset.split=1,0,0 trains on all";
}

RunData open_run_data(config::Config& config, bool resumes, RunLog& log) {
  require_files(missing_files(config, resumes));
  RunData data;
  // Mock data needs no tokenizer, and the contents of a checkpoint do not depend on whether its files happen
  // to exist.
  if (config.dataset.kind != config::DatasetKind::mock) data.tokenizer = load_tokenizer(config);
  data.datasets = open_datasets(config, data.tokenizer.get());
  if (!data.training())
    fail(ErrorCode::config, "dataset.split leaves no data for training", "dataset.split=969,30,1");
  data.tokenizer_record = tokenizer_record_of(config, data.tokenizer.get());
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
  if (const std::string unused = unused_shares(config); !unused.empty()) log.line(unused);
  return data;
}

void report_epochs(const config::Config& config, const data::Dataset& training, int64_t steps, RunLog& log) {
  constexpr double kMany = 20;
  const config::BatchRamp ramp(config);
  const int64_t samples = ramp.samples_of(steps);
  const auto most = data::most_passes(training, samples);
  if (!most) return;
  const std::string passes = fixed(most->count, most->count < 10 ? 2 : 1) + " passes over ";
  const bool blend = training.parts().size() > 1;
  const std::string what = blend ? "`" + most->part.name + "`, the part of the blend that is repeated most"
                                 : std::string("the training data");
  const int64_t batch = config::full_batch_size(config), epoch = most->part.epoch_samples;
  log.line(with_separators(steps) + " " + plural(steps, "step") + " of " +
           (ramp.grows() ? with_separators(ramp.size_at(0)) + " to " : "") + with_separators(batch) + " " +
           plural(batch, "sample") + (steps == 1 ? " makes " : " make ") + passes + what + " (" +
           with_separators(epoch) + " " + plural(epoch, "sample") + " of " +
           counted(training.sequence_length(), "token") + ")");
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
