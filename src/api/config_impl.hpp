// What a public Config holds.
#pragma once

#include <vector>

#include "capstan/config.hpp"
#include "config/core/resolve.hpp"

namespace capstan {

struct Config::Impl {
  config::Request request;
  config::Resolution resolution;
};

std::vector<config::Override> overrides_of(const std::vector<std::string>& words);

}  // namespace capstan
