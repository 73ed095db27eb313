#include "config/core/external.hpp"

#include "base/error.hpp"

namespace capstan::config {

static std::string (*reader_in_use)(const std::string& name) = nullptr;

SchemedName split_scheme(std::string_view name) {
  for (const std::string_view scheme : {"hf:", "gguf:", "peft:"})
    if (name.starts_with(scheme)) return {scheme, name.substr(scheme.size())};
  return {{}, name};
}

std::string absolute_name(std::string_view name, const std::filesystem::path& directory) {
  const auto [scheme, path] = split_scheme(name);
  return std::string(scheme) + (directory / path).lexically_normal().string();
}

std::string relative_name(std::string_view name, std::string_view absolute,
                          const std::filesystem::path& directory) {
  const auto [scheme, path] = split_scheme(name);
  if (std::filesystem::path(path).is_absolute() || absolute_name(name, directory) == absolute)
    return std::string(name);
  const std::filesystem::path target = split_scheme(absolute).path;
  return std::string(scheme) + target.lexically_relative(directory).string();
}

std::string model_as_recipe_help(const std::string& name) {
  if (is_external_model("model", name))
    return "this names a model: a recipe takes it as model=" + name + "; or {new_recipe_from} " + name;
  std::error_code unknown;
  if (!std::filesystem::exists(std::filesystem::path(name) / "config.json", unknown)) return {};
  return "a Hugging Face model is in that directory: a recipe takes it as model=hf:" + name +
         "; or {new_recipe_from} hf:" + name;
}

void read_external_models_with(std::string (*reader)(const std::string& name)) {
  reader_in_use = reader;
}

std::string external_model(const std::string& name) {
  if (!reader_in_use)
    fail(ErrorCode::unsupported, "`" + name + "`: this program does not read models of other programs");
  return reader_in_use(name);
}

}  // namespace capstan::config
