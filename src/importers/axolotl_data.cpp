// Imports the datasets of an Axolotl YAML: files, record format, loss mask and packing.
#include <set>

#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/reasons.hpp"

namespace capstan::importers {

using config::Node;

namespace {

struct Word {
  std::string_view theirs, ours;
};
constexpr Word kFormats[] = {
    {"alpaca", "alpaca"},     {"chat_template", "messages"}, {"chat_template.default", "messages"},
    {"sharegpt", "sharegpt"}, {"completion", "text"},        {"pretrain", "text"},
};
constexpr Word kTemplates[] = {
    {"alpaca", "alpaca"}, {"chatml", "chatml"}, {"gemma", "gemma"},
    {"llama3", "llama3"}, {"phi_3", "phi3"},    {"mistral_v2v3", "mistral"},
};

template <size_t N>
std::string_view word(const Word (&words)[N], std::string_view theirs) {
  for (const Word& one : words)
    if (one.theirs == theirs) return one.ours;
  return {};
}

// The settings of the entries of one list.
struct Samples {
  std::vector<std::string> files;
  std::set<std::string> formats;
};

std::vector<std::string> texts_of(const Node& node) {
  std::vector<std::string> texts;
  if (node.kind == Node::Kind::scalar) texts.push_back(node.text);
  for (const Node& item : node.items)
    if (item.kind == Node::Kind::scalar) texts.push_back(item.text);
  return texts;
}

// Sets the chat template from a name or a Jinja file; returns true if the file gives one.
bool chat_template(Reader& r, const Node& value, const SourceKey& from) {
  const std::string_view known = word(kTemplates, value.text);
  if (!known.empty()) return r.draft.set("tokenizer.chat_template", std::string(known), from);
  if (value.text.ends_with(".jinja") || value.text.ends_with(".j2"))
    return r.draft.set("tokenizer.chat_template", value, from);
  if (value.text.starts_with("tokenizer_default"))
    r.draft.omit(from, value, OmissionReason::same, "the tokenizer's own template");
  // With `jinja` the template is in chat_template_jinja.
  else if (value.text != "jinja")
    r.draft.omit(from, value, OmissionReason::to_fill_in,
                 "a .jinja file for tokenizer.chat_template; without one the tokenizer's own counts");
  return false;
}

// Checks the roles that one dataset trains on; Capstan supports the assistant alone.
void loss_roles(Reader& r, const Node& value, const SourceKey& from, bool roles) {
  bool alike = true;
  for (const std::string& text : texts_of(value))
    alike = alike && (roles ? text == "assistant" || text == "gpt" : text == "turn");
  r.draft.omit(from, value, alike ? OmissionReason::same : OmissionReason::value,
               alike ? "as here" : "see dataset.loss_mode, and `weight` of single messages");
}

void read_entry(Reader& r, const std::string& list, const Node& entry, Samples& samples) {
  std::string format;
  // Whether the records hold turns {from, value}.
  bool of_turns = false;
  const Node* files = entry.find("data_files");
  for (size_t i = 0; i < entry.keys.size(); ++i) {
    const std::string& key = entry.keys[i];
    const Node& value = entry.items[i];
    const SourceKey from{list + "." + key, entry.key_locations[i]};
    if (is_off(value)) {
      r.draft.omit(from, value, OmissionReason::off, "");
    } else if (key == "path") {
      if (files) r.draft.omit(from, value, OmissionReason::external, "data_files names the files");
      if (!files) samples.files.push_back(value.text);
    } else if (key == "data_files") {
      for (std::string& name : texts_of(value)) samples.files.push_back(std::move(name));
    } else if (key == "ds_type") {
      r.draft.omit(from, value, value.text == "json" ? OmissionReason::same : OmissionReason::value,
                   std::string(kSamples));
    } else if (key == "type") {
      const std::string name =
          value.kind == Node::Kind::scalar ? value.text.substr(0, value.text.find(':')) : "";
      format = word(kFormats, name);
      if (value.kind != Node::Kind::scalar)
        r.draft.omit(
            from, value, OmissionReason::to_fill_in,
            "a prompt of its own: samples as messages, with a Jinja file in tokenizer.chat_template");
      else if (format.empty())
        r.draft.omit(from, value,
                     name == "input_output" ? OmissionReason::unsupported : OmissionReason::value,
                     "a line holds messages, conversations, an instruction, a prompt with its completion, or "
                     "a text: see dataset.format");
      else if (name != value.text)
        r.draft.omit(from, value, OmissionReason::value, "read as " + name + " alone");
    } else if (key == "field_messages") {
      of_turns = of_turns || value.text == "conversations";
      if (value.text != "messages" && value.text != "conversations")
        r.draft.omit(from, value, OmissionReason::to_fill_in,
                     "the key is called messages or conversations here");
    } else if (key == "message_property_mappings" || key == "message_field_role" ||
               key == "message_field_content") {
      const std::string names = shown(value);
      of_turns =
          of_turns || names == "from" || names == "value" || names.find("role: from") != std::string::npos;
      r.draft.omit(from, value, OmissionReason::no_effect, "given by dataset.format");
    } else if (key == "field" && value.text != "text") {
      r.draft.omit(from, value, OmissionReason::to_fill_in, "the key of the text is called text here");
    } else if (key == "chat_template") {
      chat_template(r, value, from);
    } else if (key == "roles_to_train" || key == "train_on_eos") {
      loss_roles(r, value, from, key == "roles_to_train");
    } else if (key == "field" || key == "split" || key == "name" || key == "revision" || key == "shards" ||
               key == "trust_remote_code" || key == "preprocess_shards") {
      r.draft.omit(from, value, OmissionReason::external, "part of a dataset of the Hub");
    } else {
      r.draft.omit(from, value, OmissionReason::unknown, "no counterpart is known");
    }
  }
  if (format == "messages" && of_turns) format = "sharegpt";
  samples.formats.insert(format);
}

Samples read_list(Reader& r, const std::string& key) {
  Samples samples;
  const Node* list = r.find(key);
  if (!list) return samples;
  if (list->kind == Node::Kind::map) read_entry(r, key, *list, samples);
  for (const Node& entry : list->items)
    if (list->kind == Node::Kind::list && entry.kind == Node::Kind::map) read_entry(r, key, entry, samples);
  return samples;
}

void templates(Reader& r, bool alpaca) {
  Draft& draft = r.draft;
  if (const Node* jinja = r.find("chat_template_jinja"); jinja && !is_off(*jinja)) {
    if (jinja->text.ends_with(".jinja") || jinja->text.ends_with(".j2"))
      r.set("tokenizer.chat_template", *jinja, "chat_template_jinja");
    else
      r.omit("chat_template_jinja", *jinja, OmissionReason::to_fill_in,
             "write it into a .jinja file and name that in tokenizer.chat_template");
  }
  const Node* named = r.find("chat_template");
  if (alpaca) {
    if (named && !is_off(*named))
      r.omit("chat_template", *named, OmissionReason::no_effect, "samples of type alpaca have their own");
    draft.assume("tokenizer.chat_template", "alpaca", "what type alpaca writes around a sample");
  } else if (named && !is_off(*named)) {
    chat_template(r, *named, r.from("chat_template"));
  }
}

void rows(Reader& r) {
  Draft& draft = r.draft;
  if (r.given("sample_packing"))
    r.set("dataset.packing", r.text("sample_packing") == "auto" ? "true" : *r.text("sample_packing"),
          "sample_packing");
  draft.assume("dataset.packing", "false", "Axolotl's default");
  const auto strategy = r.text("excess_length_strategy");
  if (strategy == "drop" || strategy == "truncate")
    r.set("dataset.too_long", *strategy, "excess_length_strategy");
  else if (strategy)
    r.omit("excess_length_strategy", *strategy, OmissionReason::value,
           "samples that are too long are dropped or truncated");
  draft.assume("dataset.too_long", "drop", "Axolotl's default");
  if (r.is_true("train_on_inputs")) r.set("dataset.loss_mode", "all", "train_on_inputs");
}

void validation(Reader& r) {
  Draft& draft = r.draft;
  const Samples held = read_list(r, "test_datasets");
  const auto fraction = r.real("val_set_size");
  if (!held.files.empty()) {
    sample_files(draft, "dataset.valid_files", held.files, r.from("test_datasets"));
    return;
  }
  if (fraction && *fraction > 0 && *fraction < 1) {
    r.set("dataset.split", split_with(*fraction), "val_set_size");
    return;
  }
  if (fraction && *fraction >= 1)
    r.omit("val_set_size", OmissionReason::to_fill_in,
           "a number of samples: dataset.split expects proportions");
  draft.assume("dataset.split", "1,0,0", "no data is held out");
  draft.withdraw("validation.eval_interval", OmissionReason::no_effect, "no data is held out for validation");
}

}  // namespace

void read_axolotl_data(Reader& r) {
  Draft& draft = r.draft;
  const Samples samples = read_list(r, "datasets");
  if (samples.files.empty()) {
    if (const Node* text = r.find("pretraining_dataset"); text && !is_off(*text))
      r.omit("pretraining_dataset", *text, OmissionReason::to_fill_in,
             "`capstan data prepare` makes dataset.data_path of plain text");
    for (const char* key : {"sample_packing", "excess_length_strategy", "train_on_inputs"})
      if (const Node* value = r.find(key))
        r.omit(key, *value, is_off(*value) ? OmissionReason::off : OmissionReason::no_effect,
               "samples of plain text are full sequences");
    draft.assume_preset("dataset", "mock", "to fill in: generated tokens (mock) replace the data");
    return;
  }
  draft.assume_preset("dataset", "sft", "samples are conversations, instructions or texts");
  sample_files(draft, "dataset.train_files", samples.files, r.from("datasets"));
  const bool alike = samples.formats.size() == 1 && !samples.formats.begin()->empty();
  if (alike) r.set("dataset.format", *samples.formats.begin(), "datasets");
  templates(r, alike && *samples.formats.begin() == "alpaca");
  rows(r);
  validation(r);
}

}  // namespace capstan::importers
