// JSON Schema 2020-12 of the recipe format, for editors: generated from the field table. Cross-field rules
// are beyond it.
#pragma once

#include <map>
#include <string>

#include "config/core/field.hpp"
#include "config/core/library.hpp"

namespace capstan::config {

std::string recipe_json_schema(const Schema& schema, const Library& library);
// A section's mapping, or a preset file.
std::string section_json_schema(const Schema& schema, const SectionInfo& section);
// File name → content, for schemas/: "recipe.schema.json" and one for each section.
std::map<std::string, std::string> schema_files(const Schema& schema, const Library& library);

}  // namespace capstan::config
