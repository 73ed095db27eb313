// config.json of Hugging Face Transformers ↔ the model section.
#pragma once

#include <string>
#include <string_view>

#include "config/sections/model.hpp"
#include "tensor/dtype.hpp"

namespace capstan::interchange {

struct Family;

struct HfModel {
  const Family* family = nullptr;
  config::ModelConfig model;  // with its derived values
};
// place: what messages call the text. ErrorCode::format, ::unsupported.
HfModel read_hf_config(std::string_view text, const std::string& place);

struct HfConfig {
  const Family* family = nullptr;
  std::string text;  // as Transformers writes it: sorted keys, two blanks
};
// For a model from a recipe: of the family that computes exactly this. ErrorCode::unsupported with the fields that differ from
// the nearest family's where none does. dtype: of the weights beside it.
HfConfig write_hf_config(const config::ModelConfig& model, DType dtype);

// `text` with the type of the weights beside it in it, where it says another; else as it is.
std::string with_dtype(const std::string& text, DType dtype);

}  // namespace capstan::interchange
