#include "formats/hf_config.hpp"

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "formats/family.hpp"
#include "formats/model_section.hpp"

namespace capstan::formats {

using config::ModelConfig;

namespace {

// Context length for evaluation and generation; recipes for training set their own.
constexpr int64_t kMaxSequence = 2048;

const Family& family_of(ConfigJson& c) {
  const std::string type = c.text("model_type");
  if (const Family* family = find_family(type)) return *family;
  std::vector<std::string> names;
  for (const Family* family : all_families()) names.emplace_back(family->model_type);
  fail(ErrorCode::unsupported,
       c.location() + ": `model_type` is " + in_quotes(type) + ", a family that this version lacks",
       "it has " + join(names, ", "));
}

std::string_view torch_name(DType type) {
  return type == DType::bf16 ? "bfloat16" : type == DType::f16 ? "float16" : "float32";
}

std::optional<int64_t> prediction_layers(ConfigJson& c) {
  if (c.missing(kPredictionLayers)) return std::nullopt;
  const Json& given = c.value(kPredictionLayers);
  if (given.is_null()) return 0;
  if (given.is_number_integer() && given >= 0 && given <= kMaxPredictionLayers) return given.get<int64_t>();
  c.refuse("`" + std::string(kPredictionLayers) + "` is " + json_excerpt(given) +
           ", not a number of layers up to " + std::to_string(kMaxPredictionLayers));
  return 0;
}

}  // namespace

HfModel read_hf_config(std::string_view text, const std::string& location) {
  const Json parsed = parse_json(text, location, 16);
  ConfigJson c(parsed, location);
  HfModel result;
  result.family = &family_of(c);
  for (const std::string& name : c.texts("architectures"))
    if (name != result.family->architecture)
      c.refuse("`architectures` has " + in_quotes(name) + "; only " + result.family->architecture +
               " is read");
  c.changes_nothing({"torch_dtype", "dtype"});
  c.only("is_encoder_decoder", false, "the family has no encoder");
  c.only("tie_encoder_decoder", false, "the family has no encoder");
  result.family->read(c, result.model);
  if (result.family->has_prediction_layers) result.prediction_layers = prediction_layers(c);
  c.finish();
  const int64_t positions = result.model.max_position_embeddings.value_or(kMaxSequence);
  result.model.seq_length = std::min(positions, kMaxSequence);
  fill_in(result.model);
  return result;
}

namespace {

std::string config_text(const Family& family, const ModelConfig& model, DType dtype) {
  OrderedJson made;
  family.write(model, made);
  made["architectures"] = {family.architecture};
  made["model_type"] = family.model_type;
  made["torch_dtype"] = torch_name(dtype);
  made["use_cache"] = true;
  // Json sorts the keys.
  return dump_json(Json(made), 2) + "\n";
}

// What differs in the model that its family reads back; nullopt: the family has no such model.
std::optional<std::vector<Difference>> differences_from(const ModelConfig& model, const std::string& text) {
  try {
    return differences(model, read_hf_config(text, "config.json").model);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return std::nullopt;
  }
}

}  // namespace

HfConfig write_hf_config(const ModelConfig& given, DType dtype) {
  ModelConfig model = given;
  // The biases of queries, keys and values are one field of the families.
  model.add_qkv_bias = given.add_qkv_bias || given.add_bias_linear;
  std::optional<std::vector<Difference>> least;
  const Family* nearest = nullptr;
  for (const Family* family : all_families()) {
    if (family->has_latent_attention() != model.multi_latent_attention) continue;
    HfConfig made{family, config_text(*family, model, dtype)};
    const auto differing = differences_from(model, made.text);
    if (!differing) continue;
    if (differing->empty()) return made;
    if (!least || differing->size() < least->size()) least = differing, nearest = family;
  }
  if (!least) fail(ErrorCode::unsupported, "no family of Hugging Face's has a model of these sizes");
  std::vector<std::string> lines;
  for (const Difference& one : *least)
    lines.push_back(one.path + " is " + one.first + ", and a " + nearest->model_type + " has " + one.second);
  fail(ErrorCode::unsupported, "no family of Hugging Face's computes what this model does; the nearest is " +
                                   std::string(nearest->model_type) + ":\n    " + join(lines, "\n    "));
}

std::string with_dtype(const std::string& text, DType dtype) {
  auto parsed = ordered_json_of(text);
  // Exported weights are not quantized.
  bool changed = parsed.erase("quantization_config") > 0;
  for (const char* key : {"torch_dtype", "dtype"})
    if (parsed.contains(key) && parsed[key] != torch_name(dtype))
      parsed[key] = torch_name(dtype), changed = true;
  return changed ? dump_json(parsed, 2) + "\n" : text;
}

std::string with_prediction_layers(const std::string& text, const HfModel& its, int64_t count) {
  if (!its.family->has_prediction_layers) return text;
  // The class has one layer where the key is missing, and does not run it.
  if (its.prediction_layers ? *its.prediction_layers == count : count <= 1) return text;
  auto parsed = ordered_json_of(text);
  parsed[kPredictionLayers] = count;
  return dump_json(parsed, 2) + "\n";
}

}  // namespace capstan::formats
