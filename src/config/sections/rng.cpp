#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<RngConfig>& s) {
  s.doc("randomness of initialisation and dropout");
  s.field("seed", &RngConfig::seed).doc("seed of initial weights and dropout; the same on any layout").min(0);
}

}  // namespace capstan::config
