#include "train/trainer/smaller_steps.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "config/core/field.hpp"
#include "config/sections/moe_layers.hpp"
#include "train/setup/device.hpp"

namespace capstan::train {

namespace {

// Changes a step. Returns false where there is nothing to change.
using Change = std::function<bool(SmallerStep&)>;
// A way to save memory, in forms from the least change to the greatest.
using Technique = std::vector<Change>;

// Sets an override, in the place of an earlier one of the same field.
void set(SmallerStep& step, const std::string& field, const std::string& value) {
  const std::string text = field + "=" + value;
  const auto same = std::ranges::find_if(
      step.overrides, [&](const std::string& other) { return other.starts_with(field + "="); });
  if (same == step.overrides.end())
    step.overrides.push_back(text);
  else
    *same = text;
}

bool has_own_memory(const config::Config& config) {
  return !backend_of(config.train.device).shares_host_memory;
}

bool evaluate_smaller(SmallerStep& step) {
  config::Config& c = step.config;
  if (!c.validation.eval_interval ||
      c.validation.eval_micro_batch_size.value_or(0) <= c.train.micro_batch_size)
    return false;
  c.validation.eval_micro_batch_size = c.train.micro_batch_size;
  set(step, "validation.eval_micro_batch_size", std::to_string(c.train.micro_batch_size));
  return true;
}

bool save_synchronously(SmallerStep& step) {
  config::CheckpointConfig& c = step.config.checkpoint;
  if (!c.async_save || !c.save_interval) return false;
  c.async_save = false;
  set(step, "checkpoint.async_save", "false");
  return true;
}

// Back to the device, where the host's memory is what is missing.
bool keep_state_on_device(SmallerStep& step) {
  config::OptimizerConfig& c = step.config.optimizer;
  if (!c.optimizer_cpu_offload || !has_own_memory(step.config)) return false;
  c.optimizer_cpu_offload = false;
  set(step, "optimizer.optimizer_cpu_offload", "false");
  return true;
}

Technique stronger_sharding() {
  Technique technique;
  using enum config::ShardingStrategy;
  for (const config::ShardingStrategy stage : {optim, optim_grads, optim_grads_params})
    technique.emplace_back([stage](SmallerStep& step) {
      config::DdpConfig& c = step.config.ddp;
      const config::DistConfig& dist = step.config.dist;
      const int64_t ranks = dist.data_parallel_size.value_or(1) * dist.context_parallel_size;
      if (ranks == 1 || c.data_parallel_sharding_strategy >= stage) return false;
      c.data_parallel_sharding_strategy = stage;
      set(step, "ddp.sharding", std::string(config::enum_name(stage)));
      return true;
    });
  return technique;
}

// A smaller micro-batch leaves the global one as it is, also where it follows from the other.
Technique smaller_micro_batches(int64_t micro_batch) {
  Technique technique;
  for (int64_t micro = micro_batch; micro % 2 == 0;) {
    micro /= 2;
    technique.emplace_back([micro](SmallerStep& step) {
      config::Config& c = step.config;
      // Evaluation has the micro-batches of training unless the recipe says otherwise.
      if (c.validation.eval_micro_batch_size == c.train.micro_batch_size) {
        c.validation.eval_micro_batch_size = micro;
        if (std::ranges::any_of(step.overrides, [](const std::string& text) {
              return text.starts_with("validation.eval_micro_batch_size=");
            }))
          set(step, "validation.eval_micro_batch_size", std::to_string(micro));
      }
      if (c.train.num_microbatches) *c.train.num_microbatches *= c.train.micro_batch_size / micro;
      c.train.micro_batch_size = micro;
      set(step, "train.micro_batch_size", std::to_string(micro));
      set(step, "train.global_batch_size", std::to_string(*c.train.global_batch_size));
      return true;
    });
  }
  return technique;
}

// Recomputes MLPs, or experts, and with `norms` the norms too. Attention never keeps its scores (core_attn).
bool recompute_modules(SmallerStep& step, bool norms) {
  config::ModelConfig& m = step.config.model;
  if (m.recompute_granularity) return false;
  using enum config::RecomputeModule;
  m.recompute_granularity = config::RecomputeGranularity::selective;
  m.recompute_modules = {config::every_layer_has_experts(m) ? moe : mlp};
  if (norms) m.recompute_modules.insert(m.recompute_modules.begin(), layernorm);
  std::string names;
  for (const config::RecomputeModule module : m.recompute_modules)
    names += (names.empty() ? "" : ",") + std::string(config::enum_name(module));
  set(step, "model.recompute_granularity", "selective");
  set(step, "model.recompute_modules", "[" + names + "]");
  return true;
}
bool recompute_mlp(SmallerStep& step) {
  return recompute_modules(step, false);
}
bool recompute_norms_and_mlp(SmallerStep& step) {
  return recompute_modules(step, true);
}

bool recompute_layers(SmallerStep& step) {
  config::ModelConfig& m = step.config.model;
  if (m.recompute_granularity == config::RecomputeGranularity::full &&
      m.recompute_method == config::RecomputeMethod::uniform && m.recompute_num_layers == 1)
    return false;
  const bool selective = m.recompute_granularity == config::RecomputeGranularity::selective;
  const bool has_modules =
      selective && m.recompute_modules != std::vector{config::RecomputeModule::core_attn};
  m.recompute_granularity = config::RecomputeGranularity::full;
  m.recompute_method = config::RecomputeMethod::uniform;
  m.recompute_num_layers = 1;
  m.recompute_modules.clear();
  set(step, "model.recompute_granularity", "full");
  set(step, "model.recompute_method", "uniform");
  set(step, "model.recompute_num_layers", "1");
  if (has_modules) step.overrides.emplace_back("~model.recompute_modules");
  return true;
}

bool offload_activations(SmallerStep& step) {
  config::ModelConfig& m = step.config.model;
  const int64_t layers = m.num_layers / step.config.dist.pipeline_model_parallel_size - 1;
  if (m.cpu_offloading || !has_own_memory(step.config) || layers < 1) return false;
  m.cpu_offloading = true;
  m.cpu_offloading_num_layers = layers;
  set(step, "model.cpu_offloading", "true");
  set(step, "model.cpu_offloading_num_layers", std::to_string(layers));
  return true;
}

bool offload_state(SmallerStep& step) {
  config::OptimizerConfig& c = step.config.optimizer;
  if (c.optimizer_cpu_offload || !has_own_memory(step.config)) return false;
  c.optimizer_cpu_offload = true;
  set(step, "optimizer.optimizer_cpu_offload", "true");
  return true;
}

// The last techniques, which need more memory of the host: it may have too little.
constexpr size_t kOffloads = 2;

// Those that delay training least first.
std::vector<Technique> techniques_of(const config::Config& config) {
  return {{evaluate_smaller},
          {save_synchronously},
          {keep_state_on_device},
          stronger_sharding(),
          smaller_micro_batches(config.train.micro_batch_size),
          {recompute_mlp, recompute_norms_and_mlp, recompute_layers},
          {offload_activations},
          {offload_state}};
}

// Codes of the rules that a recipe breaks, and the paths of features that it uses and that are missing.
std::set<std::string> problems_of(const config::Config& config) {
  std::set<std::string> problems;
  for (const config::Rule& rule : config::schema().rules()) {
    config::RuleReport report;
    rule.check(&config, report);
    for (const config::Violation& violation : report.violations)
      if (!violation.warning && !violation.only_if_given) problems.insert(rule.code);
  }
  for (const auto& feature : config::missing_features(config::schema(), &config))
    problems.insert(feature.path);
  return problems;
}

class SmallerStepSearch {
 public:
  SmallerStepSearch(const config::Config& config,
                    const std::function<StepNeed(const config::Config&)>& need_of)
      : config_(config),
        need_of_(need_of),
        problems_(problems_of(config)),
        techniques_(techniques_of(config)) {}

  SmallerSteps find(size_t most) {
    SmallerSteps found;
    for (size_t i = 0; i < techniques_.size() && found.fitting.size() < most; ++i)
      for (const Change& change : techniques_[i]) {
        std::optional<SmallerStep> step = changed({{}, config_}, change);
        if (!step || !fits(*step)) continue;
        found.fitting.push_back(std::move(*step));
        break;
      }
    if (!found.fitting.empty()) return found;
    Choice choice = strongest();
    for (size_t offloads = 0; offloads <= kOffloads; ++offloads) {
      found.smallest = combined(choice);
      if (fits(found.smallest)) {
        found.fitting.push_back(with_fewest_changes(std::move(choice), std::move(found.smallest)));
        break;
      }
      if (offloads < kOffloads) choice[choice.size() - 1 - offloads] = -1;
    }
    return found;
  }

 private:
  // Forms of techniques, one of each that is applied: its index, or -1.
  using Choice = std::vector<int>;

  std::optional<SmallerStep> changed(SmallerStep step, const Change& change) const {
    if (!change(step)) return std::nullopt;
    const std::set<std::string> now = problems_of(step.config);
    return std::ranges::includes(problems_, now) ? std::optional(std::move(step)) : std::nullopt;
  }

  bool fits(SmallerStep& step) const {
    const StepNeed need = need_of_(step.config);
    step.bytes = need.bytes;
    return need.fits;
  }

  SmallerStep combined(const Choice& choice) const {
    SmallerStep step{{}, config_};
    for (size_t i = 0; i < techniques_.size(); ++i)
      if (choice[i] >= 0)
        if (auto next = changed(step, techniques_[i][static_cast<size_t>(choice[i])]))
          step = std::move(*next);
    return step;
  }

  // The greatest change of each technique that is legal together with those before it.
  Choice strongest() const {
    Choice choice(techniques_.size(), -1);
    for (size_t i = 0; i < techniques_.size(); ++i) {
      const SmallerStep before = combined(choice);
      for (int form = static_cast<int>(techniques_[i].size()) - 1; form >= 0 && choice[i] < 0; --form)
        if (changed(before, techniques_[i][static_cast<size_t>(form)])) choice[i] = form;
    }
    return choice;
  }

  // Removes or weakens the changes that delay training most, as long as the step fits.
  SmallerStep with_fewest_changes(Choice choice, SmallerStep best) const {
    for (size_t i = techniques_.size(); i-- > 0;)
      for (int form = -1; form < choice[i]; ++form) {
        Choice fewer = choice;
        fewer[i] = form;
        SmallerStep step = combined(fewer);
        if (!fits(step)) continue;
        choice = fewer, best = std::move(step);
        break;
      }
    return best;
  }

  const config::Config& config_;
  const std::function<StepNeed(const config::Config&)>& need_of_;
  const std::set<std::string> problems_;
  const std::vector<Technique> techniques_;
};

}  // namespace

SmallerSteps find_smaller_steps(const config::Config& config,
                                const std::function<StepNeed(const config::Config&)>& need_of, size_t most) {
  return SmallerStepSearch(config, need_of).find(most);
}

}  // namespace capstan::train
