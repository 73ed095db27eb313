// Operations on the model section of a recipe: derive fields, compare, write as text.
#pragma once

#include <string>
#include <vector>

#include "config/sections/model.hpp"

namespace capstan::formats {

// Sets the fields that the configuration engine derives from the section alone.
void fill_in(config::ModelConfig& model);

// A field with two different values. differences() compares the fields that determine the model's function
// and shapes, with derived values; it ignores training settings (dropout, recomputation, lengths, initial
// values).
struct Difference {
  // Path of the field, and both values as YAML.
  std::string path, first, second;
};
std::vector<Difference> differences(const config::ModelConfig& first, const config::ModelConfig& second);

// A line `field: value` for each field that is neither at its default nor derived.
std::string section_text(const config::ModelConfig& model);

}  // namespace capstan::formats
