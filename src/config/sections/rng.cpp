#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<RngConfig>& s) {
  s.doc("random seeds");
  s.field("seed", &RngConfig::seed)
      .doc("seed of weight initialization and dropout; results do not depend on the parallel layout")
      .min(0);
}

}  // namespace capstan::config
