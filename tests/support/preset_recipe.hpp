// The toy Llama of the layouts, in a preset of mixed_precision, on the test's world.
#pragma once

#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "support/devices.hpp"
#include "support/paths.hpp"
#include "support/worlds.hpp"

namespace capstan::test {

template <class D>
config::Config resolve_preset(const std::string& preset, std::vector<std::string> overrides = {},
                              int64_t layers = 4) {
  config::Request request;
  request.recipe = std::string(kSourceDirectory) + "/tests/train/layouts/llama.yaml";
  overrides.insert(overrides.end(),
                   {"mixed_precision=" + preset, "model.num_layers=" + std::to_string(layers),
                    "train.threads=1", "dist.world_size=" + std::to_string(world().size())});
  if (D::type != DeviceType::cpu) overrides.push_back("train.device=" + std::string(name_of(D::type)));
  for (const std::string& text : overrides) request.overrides.push_back(config::Override::token(text));
  const config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  return resolution.config;
}

}  // namespace capstan::test
