// config.json of Hugging Face Transformers ↔ the model section.
#pragma once

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

}  // namespace capstan::formats
