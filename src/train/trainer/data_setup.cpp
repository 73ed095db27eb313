#include "train/trainer/data_setup.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/data_sources.hpp"
#include "data/gpt_dataset.hpp"
#include "text/chat/chat_template.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/inputs.hpp"
#include "train/trainer/schedule_setup.hpp"

namespace capstan::train {

namespace {
data::Blend blend_of(const std::vector<config::WeightedPrefix>& sources) {
  data::Blend result;
  for (const auto& source : sources) {
    result.prefixes.push_back(source.prefix);
    if (!source.weight) continue;
    if (!result.weights) result.weights.emplace();
    result.weights->push_back(*source.weight);
  }
  return result;
}

static_assert(static_cast<int>(config::SampleFormat::text) == static_cast<int>(data::SftFormat::text) &&
              static_cast<int>(config::LossMode::all) == static_cast<int>(data::SftLoss::all));
}  // namespace

data::SftOptions sft_options(const config::Config& config, const text::Tokenizer& tokenizer) {
  const config::DatasetConfig& d = config.dataset;
  const auto names = [](const std::vector<config::Path>& paths) {
    std::vector<std::string> result;
    result.reserve(paths.size());
    for (const config::Path& path : paths) result.push_back(path.resolved);
    return result;
  };
  data::SftOptions options;
  options.train_files = names(d.train_files);
  options.valid_files = names(d.valid_files);
  options.test_files = names(d.test_files);
  if (d.split) options.split = *d.split;
  options.format = static_cast<data::SftFormat>(d.format);
  options.loss = static_cast<data::SftLoss>(d.loss_mode);
  options.packing = d.packing;
  options.truncate = d.too_long == config::TooLong::truncate;
  options.on_bad_line =
      d.on_bad_line == config::BadLine::skip ? data::OnBadLine::skip : data::OnBadLine::fail;
  options.max_train_samples = d.max_train_samples;
  options.sequence_length = config.model.seq_length;
  options.seed = static_cast<uint64_t>(d.random_seed);
  options.tokenizer = &tokenizer;
  if (config.tokenizer.chat_template) options.chat_template = chat_template_of(config, tokenizer);
  require_eod_token(config, tokenizer);
  options.eod = end_of_document(config, tokenizer);
  options.threads = static_cast<int>(config.train.threads.value_or(0));
  return options;
}

// Megatron's order depends on how many samples each split will be asked for: those that Megatron-LM would ask
// for, where a batch that is rounded down counts as given, so that the order does not depend on the number of
// ranks.
static void set_megatron_order(const config::Config& config, data::GptDatasetOptions& options) {
  int64_t steps = 0;
  if (config.train.epochs && !config.train.train_iters) {
    // An epoch has as many samples in either order.
    data::GptDatasetOptions counted = options;
    counted.build = {data::BuildSplit::yes, data::BuildSplit::no, data::BuildSplit::no};
    steps = steps_of_epochs(config, *data::build_gpt_datasets(counted)[0]);
  } else {
    steps = total_iterations(config);
  }
  const auto& v = config.validation;
  config::Config as_given = config;
  as_given.train.decrease_batch_size_if_needed = false;
  const int64_t eval_batch = config::eval_batch_size(as_given);
  options.order = data::DataOrder::megatron;
  options.num_samples[0] = config.train.decrease_batch_size_if_needed && config.train.train_samples
                               ? *config.train.train_samples
                               : config::BatchRamp(as_given).samples_of(steps);
  if (v.eval_interval)
    options.num_samples[1] = checked_mul(checked_mul(steps / *v.eval_interval + 1, v.eval_iters), eval_batch);
  options.num_samples[2] = checked_mul(v.eval_iters, eval_batch);
}

static std::array<std::shared_ptr<const data::Dataset>, 3> open_sft_datasets(
    const config::Config& config, const text::Tokenizer* tokenizer) {
  CAPSTAN_ASSERT(tokenizer, "fine-tuning data without a tokenizer, which the rules refuse");
  data::SftOptions options = sft_options(config, *tokenizer);
  // Files that only an evaluation would read; beside others `split` is not used.
  if (!config.validation.eval_interval && (!options.valid_files.empty() || !options.test_files.empty())) {
    options.valid_files.clear(), options.test_files.clear();
    options.split = "1,0,0";
  }
  const auto splits = data::build_sft_datasets(options);
  if (config.validation.eval_interval && !splits[1])
    fail(ErrorCode::failed, "the validation split has no sample",
         "a larger share, as in dataset.split=90,10,0; files in dataset.valid_files; or "
         "validation.eval_interval=null");
  std::array<std::shared_ptr<const data::Dataset>, 3> result;
  std::copy(splits.begin(), splits.end(), result.begin());
  return result;
}

static data::GptDatasetOptions gpt_options(const config::Config& config, const text::Tokenizer* tokenizer) {
  const config::DatasetConfig& d = config.dataset;
  data::GptDatasetOptions options;
  options.sequence_length = config.model.seq_length;
  options.seed = static_cast<uint64_t>(d.random_seed);
  options.vocab_size = config.model.vocab_size;
  options.tokenizer = tokenizer;
  options.tokenizer_name = tokenizer_name(config.tokenizer);
  options.mock = d.kind == config::DatasetKind::mock;
  if (!options.mock) {
    const config::DataSources sources = config::data_sources(d);
    if (sources.shares) {
      options.blend = blend_of(sources.splits[0]);
      if (d.split) options.split = *d.split;
    } else {
      for (size_t i = 0; i < 3; ++i) options.blend_per_split[i] = blend_of(sources.splits[i]);
    }
  }
  const bool evaluated = config.validation.eval_interval.has_value();
  const bool own_test = !d.test_blend.empty();
  options.build = {data::BuildSplit::yes, evaluated ? data::BuildSplit::yes : data::BuildSplit::no,
                   !evaluated || options.mock ? data::BuildSplit::no
                   : own_test                 ? data::BuildSplit::yes
                                              : data::BuildSplit::if_possible};
  if (d.path_to_cache) options.cache = d.path_to_cache->resolved;
  options.documents.reset_position_ids = d.reset_position_ids;
  options.documents.reset_attention_mask = d.reset_attention_mask;
  options.documents.eod_mask_loss = d.eod_mask_loss;
  if (tokenizer) {
    require_eod_token(config, *tokenizer);
    options.documents.eod = end_of_document(config, *tokenizer);
  }
  if (d.sample_order == config::SampleOrder::megatron && !options.mock) set_megatron_order(config, options);
  return options;
}

std::array<std::shared_ptr<const data::Dataset>, 3> open_datasets(const config::Config& config,
                                                                  const text::Tokenizer* tokenizer) {
  if (config.dataset.kind == config::DatasetKind::sft) return open_sft_datasets(config, tokenizer);
  const auto splits = data::build_gpt_datasets(gpt_options(config, tokenizer));
  std::array<std::shared_ptr<const data::Dataset>, 3> result;
  std::copy(splits.begin(), splits.end(), result.begin());
  return result;
}

int64_t steps_of_epochs(const config::Config& config, const data::Dataset& data) {
  CAPSTAN_ASSERT(config.train.epochs, "a run whose length is given in passes");
  if (data.epoch_samples() == data::SampleSource::kEndless)
    fail(ErrorCode::config, "train.epochs counts passes over data, and generated data has no end",
         "train.train_iters=100 train.epochs=null");
  return ceil_div(data.samples_in(*config.train.epochs), config::full_batch_size(config));
}

int64_t total_iterations_after(const config::Config& config, const data::Dataset& data, int64_t steps,
                               int64_t consumed) {
  const config::TrainConfig& t = config.train;
  if (!t.decrease_batch_size_if_needed || (!t.train_samples && !t.epochs)) return total_iterations(config);
  if (t.train_samples)
    return steps + std::max<int64_t>(0, config::BatchRamp(config).steps_in(*t.train_samples, consumed));
  const int64_t left = std::max<int64_t>(0, data.samples_in(*t.epochs) - consumed);
  return steps + ceil_div(left, config::full_batch_size(config));
}

int64_t total_iterations_of_data(const config::Config& config) {
  if (!config.train.epochs || config.train.train_iters) return total_iterations(config);
  config::Config counted = config;
  // Counts the training split alone.
  counted.validation.eval_interval.reset();
  // An epoch has as many samples in either order.
  counted.dataset.sample_order = config::SampleOrder::capstan;
  require_files(missing_files(counted));
  std::shared_ptr<const text::Tokenizer> tokenizer;
  if (counted.dataset.kind != config::DatasetKind::mock) tokenizer = load_tokenizer(counted);
  const auto datasets = open_datasets(counted, tokenizer.get());
  if (!datasets[0]) fail(ErrorCode::config, "dataset.split leaves no data for training");
  return steps_of_epochs(config, *datasets[0]);
}

}  // namespace capstan::train
