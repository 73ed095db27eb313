#include "importers/import.hpp"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/tree.hpp"
#include "importers/draft.hpp"
#include "importers/format_readers.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr FormatInfo kFormats[] = {
    {Format::megatron, "megatron", "Megatron command line",
     "a shell script or command line that runs pretrain_gpt.py, or its options (--num-layers 24 …)"},
    {Format::deepspeed, "deepspeed", "DeepSpeed configuration",
     "JSON with zero_optimization, train_micro_batch_size_per_gpu, fp16 …"},
    {Format::bridge, "bridge", "Megatron-Bridge run_config",
     "YAML whose sections (model, optimizer, ddp …) each have a _target_"},
    {Format::torchtune, "torchtune", "torchtune configuration",
     "YAML whose sections (model, tokenizer, optimizer …) have a _component_"},
    {Format::axolotl, "axolotl", "Axolotl configuration",
     "YAML with base_model, sequence_len, micro_batch_size …"},
    {Format::training_arguments, "training-arguments", "Transformers TrainingArguments",
     "JSON with per_device_train_batch_size, learning_rate, num_train_epochs …"},
};

// Keys that identify a format. The format with the most such keys is chosen.
struct FormatKeys {
  Format format;
  std::vector<std::string_view> keys;
};
const std::vector<FormatKeys>& format_keys() {
  static const std::vector<FormatKeys> list = {
      {Format::bridge,
       {"_target_", "model._target_", "optimizer._target_", "scheduler._target_", "ddp._target_",
        "checkpoint._target_", "train._target_", "dataset._target_", "tokenizer._target_"}},
      {Format::torchtune,
       {"model._component_", "tokenizer._component_", "optimizer._component_", "checkpointer._component_",
        "dataset._component_", "loss._component_", "lr_scheduler._component_", "metric_logger._component_"}},
      {Format::deepspeed,
       {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
        "steps_per_print", "fp16.enabled", "bf16.enabled", "zero_allow_untested_optimizer",
        "wall_clock_breakdown", "optimizer.params", "scheduler.params", "communication_data_type"}},
      {Format::axolotl,
       {"base_model", "sequence_len", "micro_batch_size", "num_epochs", "datasets", "adapter", "lora_r",
        "val_set_size", "sample_packing", "dataset_prepared_path", "lr_scheduler", "pad_to_sequence_len",
        "flash_attention"}},
      {Format::training_arguments,
       {"per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "learning_rate",
        "lr_scheduler_type", "warmup_ratio", "max_grad_norm", "logging_steps", "save_steps", "save_strategy",
        "eval_strategy", "evaluation_strategy", "adam_beta1"}},
  };
  return list;
}

bool has_key(const Node& root, std::string_view key) {
  const auto dot = key.find('.');
  const Node* node = root.find(key.substr(0, dot));
  return node && (dot == std::string_view::npos || has_key(*node, key.substr(dot + 1)));
}

bool looks_like_command(std::string_view text) {
  for (const std::string_view word : {"pretrain_gpt", "--num-layers", "--hidden-size", "--micro-batch-size",
                                      "--tensor-model-parallel-size"})
    if (text.find(word) != std::string_view::npos) return true;
  return false;
}

[[noreturn]] void not_recognized(const std::string& file, const Node& root) {
  std::string help = "{name_format}";
  for (const FormatInfo& info : kFormats)
    help += "\n      " + std::string(info.name) + std::string(20 - info.name.size(), ' ') +
            std::string(info.recognized);
  int sections = 0;
  for (const std::string& key : root.keys)
    sections += key == "extends" || config::schema().find_section(key) != nullptr;
  if (sections >= 2) help = "it looks like a recipe: `capstan check " + file + "`\n    " + help;
  fail(ErrorCode::format, "the format of `" + file + "` is not recognized", help);
}

struct FormatMatch {
  Format format = Format::megatron;
  long hits = 0;
};
FormatMatch best_match(const Node& root) {
  FormatMatch best;
  for (const FormatKeys& one : format_keys()) {
    const long hits = std::count_if(one.keys.begin(), one.keys.end(),
                                    [&](std::string_view key) { return has_key(root, key); });
    if (hits > best.hits) best = {one.format, hits};
  }
  return best;
}

// Replaces the tabs that indent JSON, because the YAML reader, which records locations, accepts spaces only.
// JSON strings contain no unescaped tabs.
std::string without_json_tabs(std::string text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '{')
    for (char& c : text)
      if (c == '\t') c = ' ';
  return text;
}

// A document may contain a command in a comment, but a script never looks like a document with several known
// keys.
bool is_document(const std::vector<config::Source>& sources) {
  std::vector<config::Diagnostic> problems;
  const auto tree = config::parse_yaml(0, sources, problems);
  return tree && config::count(problems, config::Level::error) == 0 && best_match(*tree).hits > 1;
}

Node parse(const std::vector<config::Source>& sources) {
  std::vector<config::Diagnostic> problems;
  auto tree = config::parse_yaml(0, sources, problems);
  if (!tree || config::count(problems, config::Level::error) > 0) {
    std::string text = "`" + sources[0].name + "` cannot be read as a configuration of another trainer";
    for (const config::Diagnostic& problem : problems)
      text += "\n" + config::render(problem, sources, {config::DiagnosticFormat::compact, false});
    while (text.ends_with('\n')) text.pop_back();
    fail(ErrorCode::format, text);
  }
  return std::move(*tree);
}

std::string name_from(const std::string& file) {
  std::string name = with_plain_characters(std::filesystem::path(file).stem().string());
  while (!name.empty() && (name[0] == '.' || name[0] == '-')) name.erase(0, 1);
  return name.empty() ? "imported" : name.substr(0, 100);
}

config::Resolution resolve_text(const std::string& recipe, const std::string& shown_name) {
  config::Request request;
  request.recipe = shown_name.find('/') == std::string::npos ? "./" + shown_name : shown_name;
  const std::string path = request.recipe;
  config::Resolution resolution = config::resolve_text(recipe, request);
  resolution.recipe_name = shown_name;
  const auto rename = [&](std::string& text) {
    for (size_t at = 0; (at = text.find(path, at)) != std::string::npos; at += shown_name.size())
      text.replace(at, path.size(), shown_name);
  };
  for (config::Diagnostic& diagnostic : resolution.diagnostics) {
    rename(diagnostic.message);
    for (std::string& note : diagnostic.notes) rename(note);
  }
  for (config::Source& source : resolution.sources)
    if (source.name == path) source.name = shown_name;
  return resolution;
}

// Resets the number of epochs of the base recipe if the file gives a number of steps, because a recipe has
// one of the two.
void reset_epochs_of_base(Draft& draft, const std::string& base) {
  const bool in_steps = draft.has("train.train_iters") || draft.has("train.train_samples");
  if (base.empty() || !in_steps || draft.has("train.epochs")) return;
  config::Request request;
  request.recipe = base;
  if (config::resolve(request).config.train.epochs)
    draft.assume("train.epochs", "null",
                 "the file gives the length in steps; the epochs of the base recipe do not apply");
}

// Other trainers set some options even if they have no effect. In a recipe these would be errors, so they are
// listed as omitted.
bool withdraw_unused(Draft& draft, const config::Resolution& resolution) {
  bool changed = false;
  for (const config::Diagnostic& diagnostic : resolution.diagnostics) {
    const bool unread = diagnostic.name == "no_effect" || diagnostic.name == "unused_value";
    // Fields of a section preset that is not selected, recomputation of activations that Capstan never
    // stores, the precision-aware optimizer that Megatron's offload needs, validation data without
    // validation, and the weight decay beside one that grows.
    const bool idle =
        diagnostic.code == "C0110" || diagnostic.name == "selective_names_more_than_core_attn" ||
        diagnostic.name == "precision_aware_stores_below_fp32" ||
        diagnostic.name == "validation_data_is_read" ||
        (diagnostic.name == "schedule_values_are_read" && diagnostic.path == "optimizer.weight_decay");
    if ((!unread && !idle) || !draft.has(diagnostic.path)) continue;
    draft.withdraw(diagnostic.path, OmissionReason::no_effect,
                   unread ? "`" + diagnostic.path + "` is " + diagnostic.label : diagnostic.message);
    changed = true;
  }
  return changed;
}

void read(Format format, Draft& draft, const std::vector<config::Source>& sources, const Node& root,
          const Options& options) {
  switch (format) {
    case Format::megatron:
      return read_megatron(draft, sources[0], options.variables);
    case Format::deepspeed:
      return read_deepspeed(draft, root);
    case Format::bridge:
      return read_bridge(draft, root);
    case Format::torchtune:
      return read_torchtune(draft, root);
    case Format::axolotl:
      return read_axolotl(draft, root);
    case Format::training_arguments:
      return read_training_arguments(draft, root);
  }
}

}  // namespace

std::span<const FormatInfo> known_formats() {
  return kFormats;
}

const FormatInfo& info_of(Format format) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const FormatInfo& info) { return info.format == format; });
}

std::string_view omission_name(OmissionReason why) {
  constexpr std::string_view names[] = {"unknown",   "value",    "to_fill_in", "unsupported", "external",
                                        "no_effect", "replaced", "same",       "off"};
  return names[static_cast<size_t>(why)];
}

std::string_view omission_title(OmissionReason why) {
  constexpr std::string_view titles[] = {"not known",
                                         "values without a counterpart",
                                         "to fill in",
                                         "not supported yet",
                                         "paths and services outside",
                                         "without effect here",
                                         "given again later",
                                         "defaults here too",
                                         "off or empty"};
  return titles[static_cast<size_t>(why)];
}

Imported import_recipe(std::string text, const std::string& file_name, const Options& options) {
  if (text.size() > static_cast<size_t>(config::TreeLimits::kFileBytes))
    fail(ErrorCode::format, "`" + file_name + "` is larger than 4 MiB");
  Imported result;
  text = without_json_tabs(config::normalized(std::move(text)));
  if (const auto at = first_invalid_utf8(text))
    fail(ErrorCode::format, "`" + file_name + "` is not UTF-8, at byte " + std::to_string(*at));
  if (const size_t at = text.find('\0'); at != std::string::npos)
    fail(ErrorCode::format, "`" + file_name + "` is not text: a NUL at byte " + std::to_string(at));
  if (trim(text).empty()) fail(ErrorCode::format, "`" + file_name + "` is empty");
  std::error_code ignored;
  result.sources.push_back({config::Source::Kind::file, file_name, std::move(text),
                            std::filesystem::absolute(file_name, ignored).parent_path().string()});

  const bool command = options.format
                           ? *options.format == Format::megatron
                           : looks_like_command(result.sources[0].text) && !is_document(result.sources);
  Node root;
  if (!command) root = parse(result.sources);
  if (options.format) {
    result.format = *options.format;
  } else if (!command) {
    const FormatMatch best = best_match(root);
    if (best.hits == 0) not_recognized(file_name, root);
    result.format = best.format;
  }

  Draft draft(result.sources);
  if (!options.base.empty())
    draft.extend(options.extends.empty() ? options.base : options.extends, "as given", options.base);
  try {
    read(result.format, draft, result.sources, root, options);
    reset_epochs_of_base(draft, options.base);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format) throw;
    fail(error.code(), "`" + file_name + "`: " + error.message(), error.marked_help());
  }

  const std::string origin = std::filesystem::path(file_name).filename().string();
  std::string title =
      "Imported from " + shown(Node::scalar(origin, {})) + "; the comments give the origin of each value.";
  // The recipe lists them too, because it is kept without the messages.
  for (const OmittedKey& omitted : draft.omitted()) {
    if (!omitted.branch) continue;
    result.undecided = true;
    std::string condition = omitted.key;
    std::replace_if(
        condition.begin(), condition.end(), [](unsigned char c) { return c < ' '; }, ' ');
    title += "\n# To fill in: `" + condition + "`, line " + std::to_string(omitted.location.line) +
             ": not decided; the settings of this branch are missing below.";
  }
  const std::string description =
      std::string(info_of(result.format).title) + " " + shown(Node::scalar(origin, {})) + ", imported";
  for (int round = 0; round < 4; ++round) {
    result.recipe = draft.recipe(title, name_from(file_name), description);
    result.resolution = resolve_text(result.recipe, options.recipe_name);
    if (!withdraw_unused(draft, result.resolution)) break;
  }
  result.taken = draft.taken();
  result.assumed = draft.assumed();
  result.omitted = draft.omitted();
  return result;
}

}  // namespace capstan::importers
