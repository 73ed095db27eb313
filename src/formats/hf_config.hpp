// config.json of Hugging Face Transformers ↔ the model section.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "config/sections/model.hpp"
#include "tensor/dtype.hpp"

namespace capstan::formats {

struct Family;

struct HfModel {
  const Family* family = nullptr;
  // The model section, including derived values.
  config::ModelConfig model;
  // The layers of multi-token prediction that a family with such layers names; nullopt: the key is missing.
  // `model` has none of them, because the recipe of a run decides whether they are read.
  std::optional<int64_t> prediction_layers;
};
// Parses a config.json; `location` names it in messages. Throws ErrorCode::format or ::unsupported.
HfModel read_hf_config(std::string_view text, const std::string& location);

struct HfConfig {
  const Family* family = nullptr;
  // The text as Transformers writes it: sorted keys, indented by two spaces.
  std::string text;
};
// Returns the config.json of the family that supports exactly the model of a recipe, with weights of type
// `dtype`. Throws ErrorCode::unsupported if there is none, with the fields that differ from the nearest
// family.
HfConfig write_hf_config(const config::ModelConfig& model, DType dtype);

// `text` with its dtype entry set to the type of the weights.
std::string with_dtype(const std::string& text, DType dtype);
// `text` with the number of layers of multi-token prediction set to `count`. A text without the key, and of
// another family, stays as it is where it says the same.
std::string with_prediction_layers(const std::string& text, const HfModel& its, int64_t count);

}  // namespace capstan::formats
