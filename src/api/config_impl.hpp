// The content of a public Config.
#pragma once

#include <vector>

#include "capstan/config.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan {

struct Config::Impl {
  config::Request request;
  config::Resolution resolution;
};

std::vector<config::Override> overrides_of(const std::vector<std::string>& words);

}  // namespace capstan
