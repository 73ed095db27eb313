#include "formats/config_json.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::formats {

using nlohmann::json;

namespace {

struct IgnoredKey {
  const char* key;
  const char* why;
};
// Keys of any family that do not affect forward and backward passes.
constexpr std::array kHarmless = {
    IgnoredKey{"_attn_implementation", "which kernel computes attention there"},
    IgnoredKey{"_attn_implementation_autoset", "the same"},
    IgnoredKey{"_name_or_path", "where it was loaded from"},
    IgnoredKey{"_flash_attn_2_enabled", "which kernel computes attention there"},
    IgnoredKey{"attn_implementation", "the same"},
    IgnoredKey{"auto_map",
               "Python code of the model's own: it is never run; the family's own computation is used"},
    IgnoredKey{"bos_token_id", "belongs to the tokenizer and to generation"},
    IgnoredKey{"chunk_size_feed_forward", "the same numbers in several pieces"},
    IgnoredKey{"eos_token_id", "belongs to the tokenizer and to generation"},
    IgnoredKey{"finetuning_task", "a note"},
    IgnoredKey{"id2label", "of classifiers"},
    IgnoredKey{"is_llama_config", "a note of SmolLM2's"},
    IgnoredKey{"label2id", "of classifiers"},
    IgnoredKey{"max_length", "generation"},
    IgnoredKey{"num_labels", "of classifiers"},
    IgnoredKey{"output_attentions", "what is returned there"},
    IgnoredKey{"output_hidden_states", "what is returned there"},
    IgnoredKey{"pad_token_id", "belongs to the tokenizer"},
    IgnoredKey{"pretraining_tp", "the same products in several pieces"},
    IgnoredKey{"problem_type", "of classifiers"},
    IgnoredKey{"return_dict", "what is returned there"},
    IgnoredKey{"task_specific_params", "generation"},
    IgnoredKey{"tokenizer_class", "belongs to the tokenizer"},
    IgnoredKey{"torchscript", "how it runs there"},
    IgnoredKey{"transformers.js_config", "how it runs there"},
    IgnoredKey{"transformers_version", "a note"},
    IgnoredKey{"unsloth_fixed", "a note"},
    IgnoredKey{"unsloth_version", "a note"},
    IgnoredKey{"use_cache", "how generation runs there"},
};

bool is_off(const json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

std::string shown(const json& value) {
  std::string text = dump_json(value);
  if (text.size() > 60) text.resize(60), text += "…";
  return text;
}

}  // namespace

ConfigJson::ConfigJson(const json& object, std::string place) : object_(object), place_(std::move(place)) {
  if (!object_.is_object()) fail(ErrorCode::format, place_ + ": it is not a JSON object");
}

bool ConfigJson::has(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

const json* ConfigJson::find(const char* key) {
  read_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void ConfigJson::wrong_type(const char* key, const json& value, const char* expected) const {
  fail(ErrorCode::format, place_ + ": `" + key + "` is " + shown(value) + ", and should be " + expected);
}

int64_t ConfigJson::integer(const char* key, std::optional<int64_t> otherwise, int64_t most) {
  const json* value = find(key);
  if (!value) {
    if (!otherwise) fail(ErrorCode::format, place_ + ": `" + key + "` is missing");
    return *otherwise;
  }
  const bool fits = value->is_number_unsigned() && value->get<uint64_t>() >= 1 &&
                    value->get<uint64_t>() <= static_cast<uint64_t>(most);
  if (!fits) wrong_type(key, *value, ("a whole number from 1 to " + std::to_string(most)).c_str());
  return value->get<int64_t>();
}

double ConfigJson::number(const char* key, std::optional<double> otherwise) {
  const json* value = find(key);
  if (!value) {
    if (!otherwise) fail(ErrorCode::format, place_ + ": `" + key + "` is missing");
    return *otherwise;
  }
  if (!value->is_number() || !std::isfinite(value->get<double>())) wrong_type(key, *value, "a finite number");
  return value->get<double>();
}

bool ConfigJson::boolean(const char* key, bool otherwise) {
  const json* value = find(key);
  if (!value) return otherwise;
  if (!value->is_boolean()) wrong_type(key, *value, "true or false");
  return value->get<bool>();
}

std::string ConfigJson::text(const char* key, std::optional<std::string> otherwise) {
  const json* value = find(key);
  if (!value) {
    if (!otherwise) fail(ErrorCode::format, place_ + ": `" + key + "` is missing");
    return *otherwise;
  }
  if (!value->is_string()) wrong_type(key, *value, "a string");
  return value->get<std::string>();
}

std::vector<double> ConfigJson::numbers(const char* key) {
  const json* value = find(key);
  if (!value) fail(ErrorCode::format, place_ + ": `" + key + "` is missing");
  std::vector<double> result;
  if (!value->is_array() || value->size() > 65536) wrong_type(key, *value, "a list of numbers");
  for (const json& item : *value) {
    if (!item.is_number() || !std::isfinite(item.get<double>()))
      wrong_type(key, item, "finite in each place");
    result.push_back(item.get<double>());
  }
  return result;
}

std::vector<std::string> ConfigJson::texts(const char* key) {
  const json* value = find(key);
  std::vector<std::string> result;
  if (!value) return result;
  if (!value->is_array()) wrong_type(key, *value, "a list of strings");
  for (const json& item : *value) {
    if (!item.is_string()) wrong_type(key, item, "a string in each place");
    result.push_back(item.get<std::string>());
  }
  return result;
}

const json& ConfigJson::value(const char* key) {
  static const json kNull;
  const json* found = find(key);
  return found ? *found : kNull;
}

void ConfigJson::only(const char* key, const json& value, const std::string& why) {
  const json* found = find(key);
  if (found && *found != value) refuse("`" + std::string(key) + "` is " + shown(*found) + ": " + why);
}

void ConfigJson::changes_nothing(std::initializer_list<const char*> keys) {
  read_.insert(keys.begin(), keys.end());
}

void ConfigJson::refuse(const std::string& problem) {
  problems_.push_back(problem);
}

void ConfigJson::finish() {
  for (const IgnoredKey& one : kHarmless) read_.insert(one.key);
  if (has("quantization_config"))
    refuse("`quantization_config`: the weights are quantized; only plain fp32, bf16 and fp16 ones are read"),
        read_.insert("quantization_config");
  std::vector<std::string> known(read_.begin(), read_.end());
  for (const auto& [key, value] : object_.items()) {
    if (read_.count(key) || is_off(value)) continue;
    const auto near = near_matches(key, known, 1);
    refuse(capstan::quoted(key) + " is " + shown(value) + ", and no key of this family" +
           (near.empty() ? "" : " (near it: `" + near[0] + "`)"));
  }
  if (problems_.empty()) return;
  fail(ErrorCode::unsupported,
       place_ + ": what it asks for would not be computed:\n    " + join_some(problems_, "\n    ", 12),
       "a key that changes no number can be removed from the file");
}

}  // namespace capstan::formats
