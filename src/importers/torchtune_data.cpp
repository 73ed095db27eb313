// Imports the dataset of a torchtune YAML: the name of a dataset builder and its arguments.
#include <algorithm>

#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/reasons.hpp"

namespace capstan::importers {

using config::Node;

namespace {

struct Builder {
  std::string_view name, source, format;
  bool learns_prompt;
};
constexpr Builder kBuilders[] = {
    {"alpaca_dataset", "tatsu-lab/alpaca", "alpaca", true},
    {"alpaca_cleaned_dataset", "yahma/alpaca-cleaned", "alpaca", true},
    {"chat_dataset", "", "", false},
    {"instruct_dataset", "", "prompt_completion", false},
    {"slimorca_dataset", "Open-Orca/SlimOrca-Dedup", "sharegpt", false},
    {"text_completion_dataset", "", "text", false},
    {"wikitext_dataset", "EleutherAI/wikitext_document_level", "text", false},
    {"cnn_dailymail_articles_dataset", "ccdv/cnn_dailymail", "text", false},
    {"samsum_dataset", "Samsung/samsum", "prompt_completion", false},
    {"grammar_dataset", "liweili/c4_200m", "prompt_completion", false},
};

// Tokenizers with their own chat template, which they use instead of one that comes with the weights.
struct TokenizerTemplate {
  std::string_view component, name;
};
constexpr TokenizerTemplate kTemplates[] = {
    {"llama3_tokenizer", "llama3"},  {"qwen2_tokenizer", "chatml"}, {"qwen2_5_tokenizer", "chatml"},
    {"phi3_mini_tokenizer", "phi3"}, {"ChatMLTemplate", "chatml"},  {"Llama2ChatTemplate", "llama2"},
};

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

std::string_view template_of(const std::string& component) {
  for (const TokenizerTemplate& one : kTemplates)
    if (one.component == last_part(component)) return one.name;
  return {};
}

struct Samples {
  std::vector<std::string> files;
  // Empty if there are several formats, or none that is known.
  std::string format;
  // Whether all entries have the same format and options.
  bool alike = true;
};

// Whether a key of an entry concerns only the source of its rows.
bool of_source(std::string_view key) {
  return key == "split" || key == "name" || key == "trust_remote_code" || key == "num_proc";
}

void read_entry(Reader& r, const std::string& list, const Node& entry, Samples& samples) {
  Draft& draft = r.draft;
  const Node* component = entry.find("_component_");
  const std::string name = component ? last_part(component->text) : "";
  const auto* builder = std::find_if(std::begin(kBuilders), std::end(kBuilders),
                                     [&](const Builder& one) { return one.name == name; });
  const bool known = builder != std::end(kBuilders);
  std::string format = known ? std::string(builder->format) : "",
              source = known ? std::string(builder->source) : "";
  std::vector<std::string> files;
  const bool train = list == "dataset";
  bool has_loss_mode = false;
  SourceKey from{list + "._component_", {}};
  for (size_t i = 0; i < entry.keys.size(); ++i) {
    const std::string& key = entry.keys[i];
    const Node& value = entry.items[i];
    const SourceKey at{list + "." + key, entry.key_locations[i]};
    if (value.kind == Node::Kind::null) {
      draft.omit(at, value, OmissionReason::off, "null");
    } else if (key == "_component_") {
      from = at;
      if (!known)
        draft.omit(
            at, value,
            name.find("preference") != std::string::npos ? OmissionReason::unsupported
                                                         : OmissionReason::value,
            name.find("preference") != std::string::npos ? std::string(kPreferences) : std::string(kSamples));
    } else if (key == "source") {
      source = value.text;
      if (entry.find("data_files"))
        draft.omit(at, value, OmissionReason::no_effect, "data_files names the files");
    } else if (key == "data_files") {
      if (value.kind == Node::Kind::scalar) files.push_back(value.text);
      for (const Node& file : value.items) files.push_back(file.text);
    } else if (key == "packed" && train) {
      draft.set("dataset.packing", value, at);
    } else if (key == "train_on_input" && train) {
      has_loss_mode = true;
      draft.set("dataset.loss_mode", truth(value.text) == true ? "all" : "assistant", at);
    } else if (key == "masking_strategy" && train) {
      has_loss_mode = true;
      const bool all = value.text == "train_on_all", last = value.text == "train_on_last";
      draft.set("dataset.loss_mode", all ? "all" : last ? "last_turn" : "assistant", at);
    } else if (key == "conversation_style") {
      format = value.text == "sharegpt" ? "sharegpt" : "messages";
    } else if (key == "conversation_column" || key == "column") {
      if (value.text != "messages" && value.text != "conversations" && value.text != "text")
        draft.omit(at, value, OmissionReason::to_fill_in, "a key with another name: see dataset.format");
    } else if (key == "column_map") {
      draft.omit(at, value, OmissionReason::to_fill_in, "keys with other names: see dataset.format");
    } else if (is_off(value)) {
      draft.omit(at, value, OmissionReason::off, "");
    } else if (of_source(key)) {
      draft.omit(at, value, OmissionReason::external, "part of a dataset of the Hub");
    } else if (key != "packed" && key != "train_on_input" && key != "masking_strategy") {
      draft.omit(at, value, OmissionReason::to_fill_in, "to be written into the samples");
    }
  }
  if (!known) return;
  if (files.empty() && !source.empty()) files.push_back(source);
  if (files.empty()) {
    draft.omit(from, component->text, OmissionReason::to_fill_in, std::string(kSamples));
    return;
  }
  if (train && !has_loss_mode)
    draft.assume("dataset.loss_mode", builder->learns_prompt ? "all" : "assistant", "torchtune's default");
  samples.alike = samples.alike && (samples.files.empty() || samples.format == format);
  samples.format = format;
  samples.files.insert(samples.files.end(), files.begin(), files.end());
}

Samples read_samples(Reader& r, const std::string& key) {
  Samples samples;
  const Node* section = r.find(key);
  if (!section) return samples;
  if (section->kind == Node::Kind::map) read_entry(r, key, *section, samples);
  for (const Node& entry : section->items)
    if (section->kind == Node::Kind::list && entry.kind == Node::Kind::map)
      read_entry(r, key, entry, samples);
  return samples;
}

}  // namespace

void read_torchtune_data(Reader& r) {
  Draft& draft = r.draft;
  const Samples train = read_samples(r, "dataset"), held = read_samples(r, "dataset_val");
  const std::string tokenizer = r.text("tokenizer._component_").value_or("");
  r.copy("dataset.packing", "packed");
  if (train.files.empty()) {
    for (const std::string& path : draft.paths_of("dataset"))
      draft.withdraw(path, OmissionReason::no_effect, "the data is to be filled in");
    draft.assume_preset("dataset", "mock", "to fill in: generated tokens (mock) replace the data");
    return;
  }
  draft.assume_preset("dataset", "sft", "samples are conversations, instructions or texts");
  sample_files(draft, "dataset.train_files", train.files, r.from("dataset"));
  if (train.alike && !train.format.empty()) {
    r.set("dataset.format", train.format, "dataset");
    if (train.format == "alpaca")
      r.omit(
          "dataset", "alpaca", OmissionReason::value,
          "Alpaca's prompt text is not added: only the chat template is, or tokenizer.chat_template=alpaca");
  }
  draft.assume("dataset.packing", "false", "torchtune's default");
  if (const auto given = r.text("tokenizer.prompt_template"); given && !template_of(*given).empty())
    r.set("tokenizer.chat_template", std::string(template_of(*given)), "tokenizer.prompt_template");
  else if (given)
    r.omit("tokenizer.prompt_template", *given, OmissionReason::to_fill_in,
           "a .jinja file for tokenizer.chat_template; without one the tokenizer's own counts");
  else if (!template_of(tokenizer).empty())
    r.set("tokenizer.chat_template", std::string(template_of(tokenizer)), "tokenizer._component_",
          "what it writes around a message");
  const auto interval = r.integer("run_val_every_n_steps");
  if (held.files.empty()) {
    draft.assume("dataset.split", "1,0,0", "no data is held out");
    if (interval)
      r.omit("run_val_every_n_steps", std::to_string(*interval), OmissionReason::no_effect,
             "no data is held out for validation");
    return;
  }
  sample_files(draft, "dataset.valid_files", held.files, r.from("dataset_val"));
  if (interval) r.copy("validation.eval_interval", "run_val_every_n_steps");
}

}  // namespace capstan::importers
