#include "capstan/config.hpp"
#include "base/json.hpp"

#include "api/config_impl.hpp"
#include "config/tools/show.hpp"
#include "formats/external_model.hpp"

namespace capstan {

namespace {

std::string render(const config::Resolution& resolution, config::DiagnosticFormat format) {
  config::RenderOptions options;
  options.format = format;
  return config::render(resolution.diagnostics, resolution.sources, options);
}

std::string show(const config::Resolution& resolution, config::ShowFormat format, std::string_view path) {
  resolution.require_ok();
  config::ShowOptions options;
  options.format = format;
  options.path = path;
  return config::show(resolution, options);
}

}  // namespace

std::vector<config::Override> overrides_of(const std::vector<std::string>& words) {
  std::vector<config::Override> overrides;
  for (const std::string& word : words) overrides.push_back(config::Override::token(word));
  return overrides;
}

Config Config::resolve(const std::string& recipe, const std::vector<std::string>& overrides,
                       std::optional<int64_t> world_size) {
  formats::use_in_recipes();
  auto impl = std::make_shared<Impl>();
  impl->request.recipe = recipe;
  impl->request.overrides = overrides_of(overrides);
  impl->request.ranks = world_size;
  impl->request.ranks_origin = "world_size";
  impl->resolution = config::resolve(impl->request);
  return Config(std::move(impl));
}

bool Config::ok() const {
  return impl_->resolution.ok();
}

std::string Config::diagnostics() const {
  if (impl_->resolution.diagnostics.empty()) return {};
  return render(impl_->resolution, config::DiagnosticFormat::human);
}

std::string Config::diagnostics_json() const {
  return render(impl_->resolution, config::DiagnosticFormat::json);
}

std::string Config::yaml(std::string_view path) const {
  return show(impl_->resolution, config::ShowFormat::yaml, path);
}

std::string Config::json(std::string_view path) const {
  return show(impl_->resolution, config::ShowFormat::json, path);
}

std::string Config::value(std::string_view path) const {
  const auto value = ordered_json_of(json(path));
  return value.is_string() ? value.get<std::string>() : dump_json(value);
}

}  // namespace capstan
