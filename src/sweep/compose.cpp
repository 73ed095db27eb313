#include "sweep/compose.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.hpp"
#include "config/core/emit.hpp"
#include "config/core/hash.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/tools/show.hpp"
#include "sweep/values.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/schedule_setup.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::sweep {

using config::Config;
using config::Effect;
using config::FieldInfo;

namespace {

// True for a field that changes the model that a run produces, or its speed. False for fields of output,
// logging and placement on the machine, and for time limits.
bool decides_training(const FieldInfo& field) {
  constexpr std::array<std::string_view, 5> placement{"train.device", "train.threads", "dataset.num_workers",
                                                      "dist.distributed_backend", "resilience.memory_limit"};
  if (std::find(placement.begin(), placement.end(), field.path) != placement.end()) return false;
  return field.section == "tokenizer" || (field.effect != Effect::io && field.effect != Effect::log);
}

// The fields of `validation` to which the definition gives more than one value. They change the metric by
// which trials are ranked, so that trials that differ only in them are different trials.
std::set<std::string, std::less<>> varied_validation(const Definition& definition) {
  std::map<std::string, std::set<std::string>> values;
  for (const Axis& axis : definition.axes) values[axis.path].insert(axis.values.begin(), axis.values.end());
  for (const Values& row : definition.link)
    for (const auto& [path, value] : row) values[path].insert(value);
  std::set<std::string, std::less<>> varied;
  for (const auto& [path, given] : values)
    if (path.starts_with("validation.") && given.size() != 1) varied.insert(path);
  return varied;
}

}  // namespace

bool Composer::counts(const FieldInfo& field) const {
  return decides_training(field) || varied_validation_.contains(field.path);
}

std::string Composer::form_of(const Config& config, bool with_seed) const {
  return config::canonical_form(config::schema(), &config, [&](const FieldInfo& field) {
    return counts(field) && (with_seed || field.path != kSeedPath);
  });
}

// Passes over data are counted as the run counts them; samples of the same data are counted once.
std::optional<int64_t> Composer::steps_of(const Config& config, std::string& why_unknown) {
  if (!config.train.epochs || config.train.train_iters) return train::total_iterations(config);
  const std::string key = config::canonical_form(config::schema(), &config, [](const FieldInfo& field) {
    return field.section == "dataset" || field.section == "tokenizer" || field.path == "train.epochs" ||
           field.path == "train.global_batch_size" || field.path == "train.micro_batch_size" ||
           field.path == "train.decrease_batch_size_if_needed" || field.path == "dist.data_parallel_size" ||
           field.path == "model.seq_length" || field.path == "model.vocab_size";
  });
  auto found = lengths_.find(key);
  if (found == lengths_.end()) {
    std::pair<std::optional<int64_t>, std::string> length;
    try {
      length.first = train::total_iterations_of_data(config);
    } catch (const Error& error) {
      length.second = error.message();
    }
    found = lengths_.emplace(key, std::move(length)).first;
  }
  why_unknown = found->second.second;
  return found->second.first;
}

config::Request Composer::request_for(std::string recipe) const {
  config::Request request;
  request.recipe = std::move(recipe);
  for (const std::string_view own : kPerTrialPaths) request.unset.emplace_back(own);
  request.ranks = definition_.resources.ranks;
  request.ranks_origin = "resources.ranks";
  return request;
}

config::Resolution Composer::resolve(const Values& values, std::optional<int64_t> seed) const {
  const bool path = definition_.base.find('/') != std::string::npos || definition_.base.ends_with(".yaml") ||
                    definition_.base.ends_with(".yml");
  config::Request request = request_for(
      path ? (std::filesystem::path(definition_.directory) / definition_.base).lexically_normal().string()
           : definition_.base);
  request.directory = definition_.directory;
  std::vector<std::string> origins;
  const auto add = [&](config::Override override, const char* origin) {
    request.overrides.push_back(std::move(override));
    origins.emplace_back(origin);
  };
  for (const std::string& word : definition_.set)
    add(word.starts_with('@') ? config::Override::file(word.substr(1)) : config::Override::token(word),
        "sweep: set");
  for (const auto& [name, value] : values) add(config::Override::token(name + "=" + value), "sweep: varied");
  if (seed) add(config::Override::token(std::string(kSeedPath) + "=" + std::to_string(*seed)), "sweep: seed");
  if (definition_.resources.threads)
    add(config::Override::token("train.threads=" + std::to_string(*definition_.resources.threads)),
        "sweep: resources");
  config::Resolution resolution = config::resolve(request);
  // These overrides are in no file and on no command line, so the origin of their values names the part of
  // the sweep definition instead.
  for (auto& [ignored, origin] : resolution.origins)
    if (origin.kind == config::Origin::Kind::cli && origin.location.line >= 1 &&
        static_cast<size_t>(origin.location.line) <= origins.size())
      origin.text = origins[static_cast<size_t>(origin.location.line) - 1];
  return resolution;
}

Composer::Composer(const Definition& definition)
    : definition_(definition), varied_validation_(varied_validation(definition)) {
  const config::Resolution base = resolve({}, std::nullopt);
  // Other errors of the base are accepted: the axes may set the fields that are missing.
  if (base.malformed || base.bad_words)
    fail(base.malformed ? ErrorCode::format : ErrorCode::config,
         "the base `" + definition.base + "` cannot be composed" +
             errors_text(base.diagnostics, base.sources));
  base_hash_ = config::hash_of(form_of(base.config));
}

std::string Composer::stored_form(const std::filesystem::path& recipe) const {
  const config::Resolution resolution = config::resolve(request_for(recipe.string()));
  for (const config::Diagnostic& diagnostic : resolution.diagnostics)
    if (diagnostic.level == config::Level::error) fail(ErrorCode::config, described(diagnostic));
  return form_of(resolution.config);
}

const train::ResidentData& Composer::resident_data(const Config& config) {
  // Megatron's order depends on the length of the run too.
  const bool by_length = config.dataset.sample_order == config::SampleOrder::megatron;
  const std::string key = config::canonical_form(config::schema(), &config, [&](const FieldInfo& field) {
    if (field.path == "dataset.random_seed") return false;
    return field.section == "dataset" || field.section == "tokenizer" || field.section == "validation" ||
           field.path == "model.seq_length" || field.path == "model.vocab_size" ||
           (by_length && field.section == "train");
  });
  auto found = data_.find(key);
  if (found == data_.end()) found = data_.emplace(key, train::resident_data(config)).first;
  return found->second;
}

TrialEstimate Composer::estimate(const Config& config, int64_t resident_data, std::string& why_unknown) {
  TrialEstimate out;
  out.steps = steps_of(config, why_unknown);
  const int64_t samples = config::BatchRamp(config).samples_of(out.steps.value_or(0));
  out.tokens = samples * config.model.seq_length;
  // The meta step is expensive, so trials that allocate the same memory share its result. Real-valued fields,
  // such as learning rates, change the allocations only where they are 0.
  std::string key = std::to_string(resident_data) + "\n";
  for (const FieldInfo* field : config::schema().fields()) {
    if (!counts(*field) || field->path == kSeedPath || field->section == "scheduler" ||
        field->section == "dataset" || !config::schema().sections()[field->section_index].at(&config))
      continue;
    const config::Value value = config::schema().load(&config, *field);
    key += field->path + "=" +
           (value.kind == config::Value::Kind::real ? (value.real != 0 ? "x" : "0")
                                                    : config::json(*field->type, value)) +
           "\n";
  }
  auto found = estimates_.find(key);
  if (found == estimates_.end()) {
    const train::StepEstimate step =
        train::estimate_step(config, 0, static_cast<int>(config.dist.world_size), resident_data);
    // Number of micro-batches of a step on all ranks; `step.flops` counts one micro-batch of a rank.
    const double ranks = static_cast<double>(config.dist.world_size) *
                         static_cast<double>(config.train.num_microbatches.value_or(1));
    found =
        estimates_
            .emplace(key, std::pair(step.flops * ranks / static_cast<double>(config::full_batch_size(config)),
                                    step.memory.total()))
            .first;
  }
  out.flops = found->second.first * static_cast<double>(samples);
  out.memory_bytes = found->second.second;
  return out;
}

ComposedTrial Composer::compose(const Values& values, std::optional<int64_t> seed) {
  ComposedTrial out;
  config::Resolution resolution = resolve(values, seed);
  for (const config::Diagnostic& diagnostic : resolution.diagnostics) {
    if (diagnostic.level == config::Level::error) out.reasons.push_back(described(diagnostic));
    if (diagnostic.level == config::Level::warning) out.warnings.push_back(described(diagnostic));
  }
  for (const auto& [section, preset] : values) {
    const int64_t count = config::hidden_fields(resolution, section, preset);
    if (count > 0)
      out.warnings.push_back("preset " + section + "/" + preset + " does not set " + std::to_string(count) +
                             " of its fields, which the base sets: `capstan check " + definition_.base + " " +
                             section + "=" + preset + "` names them");
  }
  TrialPlan& trial = out.trial;
  trial.values = values;
  trial.seed = seed;
  if (!out.reasons.empty()) return out;
  const config::Schema& schema = config::schema();
  Config& config = resolution.config;
  for (const auto& feature : config::missing_features(schema, &config))
    out.reasons.push_back("this version cannot train `" + feature.path + "`: " + feature.reason);
  if (!out.reasons.empty()) return out;
  try {
    const train::ResidentData& data = resident_data(config);
    if (!data.left_out.empty()) out.warnings.push_back("memory is estimated without " + data.left_out);
    trial.estimate = estimate(config, data.bytes, out.unknown_length);
    train::check_memory_limit(config, data.bytes);
  } catch (const Error& error) {
    out.reasons.push_back(error.message());
    return out;
  }
  out.valid = true;
  if (config.validation.eval_iters > 0) out.eval_interval = config.validation.eval_interval;
  trial.ranks = config.dist.world_size;
  trial.threads = config.train.threads;
  // Values as the recipe shows them, however they were written.
  for (auto& [path, value] : trial.values)
    if (const auto target = find_target(path); target && target->field && !target->inside)
      value = config::yaml_inline(*target->field->type, schema.load(&config, *target->field));
  out.form = form_of(config);
  trial.hash = config::hash_of(out.form);
  trial.configuration_hash = config::hash_of(form_of(config, false));
  // The run's name, if the trial is run by itself.
  config.name = definition_.name + "-" + trial.hash.substr(0, 8);
  out.files.recipe = config::resolved_recipe(resolution);
  std::string& overrides = out.files.overrides;
  for (const std::string& word : definition_.set) overrides += word + "\n";
  for (const auto& [path, value] : values) overrides += path + "=" + value + "\n";
  if (seed) overrides += std::string(kSeedPath) + "=" + std::to_string(*seed) + "\n";
  return out;
}

}  // namespace capstan::sweep
