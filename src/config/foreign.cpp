#include "config/foreign.hpp"

#include "base/error.hpp"

namespace capstan::config {

static std::string (*reader_in_use)(const std::string& name) = nullptr;

void read_foreign_models_with(std::string (*reader)(const std::string& name)) {
  reader_in_use = reader;
}

std::string foreign_model(const std::string& name) {
  if (!reader_in_use)
    fail(ErrorCode::unsupported, "`" + name + "`: this program does not read models of other programs");
  return reader_in_use(name);
}

}  // namespace capstan::config
