// The toy recipes of the layouts (tests/train/layouts), on the test's world.
#pragma once

#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "support/devices.hpp"
#include "support/paths.hpp"
#include "support/worlds.hpp"

namespace capstan::test {

inline config::Config resolve_layout(const std::string& recipe, const std::vector<std::string>& overrides) {
  config::Request request;
  request.recipe = std::string(kSourceDirectory) + "/tests/train/layouts/" + recipe + ".yaml";
  for (const std::string& text : overrides) request.overrides.push_back(config::Override::token(text));
  request.overrides.push_back(config::Override::token("dist.world_size=" + std::to_string(world().size())));
  const config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  return resolution.config;
}

// The Llama in a preset of mixed_precision.
template <class D>
config::Config resolve_preset(const std::string& preset, std::vector<std::string> overrides = {},
                              int64_t layers = 4) {
  overrides.insert(overrides.end(), {"mixed_precision=" + preset,
                                     "model.num_layers=" + std::to_string(layers), "train.threads=1"});
  if (D::type != DeviceType::cpu) overrides.push_back("train.device=" + std::string(name_of(D::type)));
  return resolve_layout("llama", overrides);
}

}  // namespace capstan::test
