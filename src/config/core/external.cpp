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

std::string model_scheme(const std::filesystem::path& path) {
  std::error_code unknown;
  if (std::filesystem::exists(path / "config.json", unknown)) return "hf:";
  return path.extension() == ".gguf" && std::filesystem::is_regular_file(path, unknown) ? "gguf:" : "";
}

std::string model_found_text(std::string_view scheme) {
  return scheme == "hf:" ? "a Hugging Face model is in that directory" : "that file is a model";
}

std::string model_as_recipe_help(const std::string& name) {
  const bool has_scheme = is_external_model("model", name);
  const std::string scheme = has_scheme ? "" : model_scheme(name);
  if (!has_scheme && scheme.empty()) return {};
  return (has_scheme ? "this names a model" : model_found_text(scheme)) +
         ": a recipe takes it as model=" + scheme + name + "; or {new_recipe_from} " + scheme + name;
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
