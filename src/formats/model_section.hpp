// The model section of a recipe as a value of its own: filled in, compared, written as text.
#pragma once

#include <string>
#include <vector>

#include "config/sections/model.hpp"

namespace capstan::interchange {

// What the engine derives from the section alone, where it is open.
void fill_in(config::ModelConfig& model);

// Fields that decide what the model computes and in which shapes, and differ: "model.rotary_base is 10000 here and 500000 there".
// Both with their derived values; how a model is trained (dropout, recomputation, lengths, initial values) is left out.
struct Difference {
  std::string path, first, second;  // values as YAML
};
std::vector<Difference> differences(const config::ModelConfig& first, const config::ModelConfig& second);

// A line `field: value` for each field that is neither at its default nor what is derived anyway.
std::string section_text(const config::ModelConfig& model);

}  // namespace capstan::interchange
