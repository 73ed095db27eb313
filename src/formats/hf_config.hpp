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
  config::ModelConfig model;  // with its derived values
};
// place: the name of the text in messages. ErrorCode::format, ::unsupported.
HfModel read_hf_config(std::string_view text, const std::string& place);

struct HfConfig {
  const Family* family = nullptr;
  // As Transformers writes it: sorted keys, two blanks.
  std::string text;
};
// For a model from a recipe: the config.json of the family that supports exactly this model.
// ErrorCode::unsupported, with the fields that differ from the nearest family, where there is none. dtype: of
// the weights.
HfConfig write_hf_config(const config::ModelConfig& model, DType dtype);

// `text` with its dtype entry set to the type of the weights.
std::string with_dtype(const std::string& text, DType dtype);

}  // namespace capstan::formats
