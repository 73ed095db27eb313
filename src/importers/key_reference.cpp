#include "importers/key_reference.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/tools/markdown.hpp"
#include "importers/format_readers.hpp"

namespace capstan::importers {

namespace {

using config::code;

struct Chapter {
  Format format;
  std::string_view title, introduction;
};

constexpr std::string_view kIntroduction =
    "# Coming from Megatron-LM, Axolotl or torchtune\n"
    "\n"
    "Reference, for users of these trainers: the Capstan field for each of their options. Generated from the "
    "tables of `capstan recipe import` by `scripts/docs.sh`.\n"
    "\n"
    "You need not translate by hand: `capstan recipe import FILE` writes the recipe and lists every option "
    "that it did not take, with the reason ([importing](importing.md), which also covers DeepSpeed, "
    "Megatron-Bridge and the `TrainingArguments` of Transformers). `capstan explain FIELD` describes a "
    "field. `(preset)` means that the option chooses a preset of the section, as in "
    "`mixed_precision=bf16_mixed`. "
    "An option with several fields sets the one that its value, or the options beside it, call for.\n";

constexpr Chapter kChapters[] = {
    {Format::megatron, "Megatron-LM",
     "Capstan's fields have Megatron's names: an option that is not in these tables and has the name of a "
     "field sets that field, with underscores for dashes (`--num-layers` is `model.num_layers`, `--lr` is "
     "`optimizer.lr`, and `--pipeline-model-parallel-size` is `dist.pipeline_model_parallel_size`). The "
     "first table lists options whose spelling or meaning differs, retired spellings among them.\n"},
    {Format::axolotl, "Axolotl", "The keys of an Axolotl YAML.\n"},
    {Format::torchtune, "torchtune", "The keys of a torchtune YAML, with their sections.\n"},
};

std::span<const Rule> rules_of(Format format) {
  switch (format) {
    case Format::megatron:
      return megatron_rules();
    case Format::axolotl:
      return axolotl_rules();
    case Format::torchtune:
      return torchtune_rules();
    default:
      fail(ErrorCode::usage, "the keys of `" + std::string(info_of(format).name) + "` are not listed");
  }
}

std::string change_of_value(const Rule& rule) {
  if (rule.kind == Rule::Kind::set_if_present) return "`" + std::string(rule.text) + "`";
  if (rule.kind == Rule::Kind::negate) return "negated";
  if (rule.kind != Rule::Kind::translate) return {};
  std::vector<std::string> changes;
  for (const auto pair : split(rule.text, ' ')) {
    const size_t equals = pair.find('=');
    const auto from = pair.substr(0, equals), to = pair.substr(equals + 1);
    changes.push_back(from == to ? "`" + std::string(to) + "`"
                                 : "`" + std::string(from) + "` → `" + std::string(to) + "`");
  }
  return join(changes, ", ");
}

std::string reason_of(const Rule& rule) {
  const std::string text(rule.text);
  if (rule.kind != Rule::Kind::omit) return text;
  switch (rule.why) {
    case OmissionReason::unsupported:
      return "not supported: " + text;
    case OmissionReason::to_fill_in:
      return "to fill in: " + text;
    case OmissionReason::external:
      return "not used: " + text;
    default:
      return "no effect: " + text;
  }
}

// Converts "dataset (preset)" to "`dataset` (preset)".
std::string shown_target(const std::string& target) {
  const size_t blank = target.find(' ');
  return blank == std::string::npos ? code(target) : code(target.substr(0, blank)) + target.substr(blank);
}

std::string chapter_text(const Chapter& chapter) {
  const std::vector<KeyReference> keys = key_reference(chapter.format);
  std::string text = "\n## " + std::string(chapter.title) + "\n\n" + std::string(chapter.introduction) +
                     "\n| option | Capstan field | value |\n|---|---|---|\n";
  // Pairs of a reason and the keys that it applies to.
  std::vector<std::pair<std::string, std::string>> without;
  for (const KeyReference& one : keys) {
    if (!one.targets.empty()) {
      std::string targets;
      for (const std::string& target : one.targets)
        targets += (targets.empty() ? "" : ", ") + shown_target(target);
      text += "| " + code(one.key) + " | " + targets + " | " + one.value + " |\n";
      continue;
    }
    const auto same = std::find_if(without.begin(), without.end(),
                                   [&](const auto& entry) { return entry.first == one.reason; });
    if (same == without.end())
      without.emplace_back(one.reason, code(one.key));
    else
      same->second += ", " + code(one.key);
  }
  text += "\nWithout a counterpart:\n\n| option | why |\n|---|---|\n";
  for (const auto& [reason, names] : without) text += "| " + names + " | " + reason + " |\n";
  return text;
}

}  // namespace

std::span<const Format> referenced_formats() {
  static constexpr Format all[] = {Format::megatron, Format::axolotl, Format::torchtune};
  return all;
}

std::vector<KeyReference> key_reference(Format format) {
  std::vector<KeyReference> keys;
  for (const Rule& rule : rules_of(format)) {
    KeyReference key{.key = rule.key, .targets = {}, .value = change_of_value(rule), .reason = {}};
    for (const auto target : split(rule.path, ','))
      if (const auto name = trim(target); !name.empty()) key.targets.emplace_back(name);
    if (key.targets.empty()) key.reason = reason_of(rule);
    keys.push_back(std::move(key));
  }
  return keys;
}

std::string coming_from_page() {
  std::string text(kIntroduction);
  for (const Chapter& chapter : kChapters) text += chapter_text(chapter);
  return config::wrapped_markdown(text);
}

}  // namespace capstan::importers
