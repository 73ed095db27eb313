#include "formats/config_json.hpp"

#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::formats {

namespace {

// Keys of any family that do not affect forward and backward passes.
constexpr const char* kHarmless[] = {
    // Keys that choose kernels, chunk sizes and return values.
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "attn_implementation",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict",
    "torchscript", "transformers.js_config",
    // Python code of the model, which is never run; Capstan uses the computation of the family.
    "auto_map",
    // Settings of the tokenizer, of generation and of classifiers, which training does not use.
    "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "max_length", "task_specific_params",
    "use_cache", "id2label", "label2id", "num_labels", "problem_type",
    // Remarks.
    "_name_or_path", "finetuning_task", "is_llama_config", "transformers_version", "unsloth_fixed",
    "unsloth_version"};

bool is_off(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

}  // namespace

ConfigJson::ConfigJson(const Json& object, std::string location)
    : object_(object), location_(std::move(location)) {
  if (!object_.is_object()) fail(ErrorCode::format, location_ + ": it is not a JSON object");
}

bool ConfigJson::has(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

std::optional<JsonView> ConfigJson::find(const char* key, bool optional) {
  read_.insert(key);
  if (has(key)) return JsonView(object_.at(key), location_, key);
  if (!optional) fail(ErrorCode::format, location_ + ": `" + key + "` is missing");
  return std::nullopt;
}

int64_t ConfigJson::integer(const char* key, std::optional<int64_t> otherwise, int64_t most) {
  const auto value = find(key, otherwise.has_value());
  return value ? value->integer(1, most) : *otherwise;
}

double ConfigJson::number(const char* key, std::optional<double> otherwise) {
  const auto value = find(key, otherwise.has_value());
  return value ? value->number() : *otherwise;
}

bool ConfigJson::boolean(const char* key, bool otherwise) {
  const auto value = find(key);
  return value ? value->boolean() : otherwise;
}

std::string ConfigJson::text(const char* key, std::optional<std::string> otherwise) {
  const auto value = find(key, otherwise.has_value());
  return value ? value->string() : *otherwise;
}

std::vector<double> ConfigJson::numbers(const char* key) {
  std::vector<double> result;
  const auto items = find(key, false)->items();
  if (items.size() > 65536)
    fail(ErrorCode::format, location_ + ": `" + key + "` has more than 65536 numbers");
  for (const JsonView& item : items) result.push_back(item.number());
  return result;
}

std::vector<std::string> ConfigJson::texts(const char* key) {
  std::vector<std::string> result;
  if (const auto value = find(key))
    for (const JsonView& item : value->items()) result.push_back(item.string());
  return result;
}

const Json& ConfigJson::value(const char* key) {
  static const Json kNull;
  read_.insert(key);
  return has(key) ? object_.at(key) : kNull;
}

void ConfigJson::only(const char* key, const Json& value, const std::string& why) {
  if (const Json& found = this->value(key); !found.is_null() && found != value)
    refuse("`" + std::string(key) + "` is " + json_excerpt(found) + ": " + why);
}

void ConfigJson::changes_nothing(std::initializer_list<const char*> keys) {
  read_.insert(keys.begin(), keys.end());
}

void ConfigJson::refuse(const std::string& problem) {
  problems_.push_back(problem);
}

void ConfigJson::finish() {
  read_.insert(std::begin(kHarmless), std::end(kHarmless));
  if (has("quantization_config") && !read_.count("quantization_config"))
    refuse("`quantization_config`: the weights are quantized; only plain fp32, bf16 and fp16 ones are read"),
        read_.insert("quantization_config");
  std::vector<std::string> known(read_.begin(), read_.end());
  for (const auto& [key, value] : object_.items()) {
    if (read_.count(key) || is_off(value)) continue;
    const auto near = near_matches(key, known, 1);
    refuse(in_quotes(key) + " is " + json_excerpt(value) + ", and no key of this family" +
           (near.empty() ? "" : " (near it: `" + near[0] + "`)"));
  }
  if (problems_.empty()) return;
  fail(ErrorCode::unsupported,
       location_ + ": these keys or values are not supported:\n    " + join_some(problems_, "\n    ", 12),
       "a key that changes no number can be removed from the file");
}

}  // namespace capstan::formats
