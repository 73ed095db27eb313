// The inputs of fine-tuning under the names of other trainers: the base model's weights and tokenizer, the
// layers that are adapted, samples in JSON lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "importers/rule.hpp"

namespace capstan::importers {

// Whether the name is a file path, not a model name on a hub.
bool is_path(std::string_view name);

// Sets the base weights of another program and their tokenizer. For a model name on a hub, sets the directory
// in which they are expected.
void base_weights(Draft& draft, const std::string& name, const SourceKey& from);
void tokenizer_of_base(Draft& draft);
// Reads the key `save`, the directory of checkpoints, and `load`, the checkpoint that training continues.
void save_and_load(Reader& reader, std::string_view save, std::string_view load);

// Adapted modules by their names in Transformers and torchtune (`q_proj`, `w1`, `c_attn`). If q, k and v are
// separate modules, each has its own adapter. Unknown names are listed as omitted.
struct AdaptedModules {
  std::vector<config::Node> modules;
  SourceKey from;
  // The key that chooses the kind of adapter.
  SourceKey scheme;
  bool dora = false;
  // Layer indices; empty: all layers.
  std::vector<config::Node> layers;
};
void adapt_modules(Draft& draft, const AdaptedModules& adapted);
// Adapts all linear modules. `from` is the key that requests it; `reason` explains the assumption if no key
// does.
void adapt_all_modules(Draft& draft, const SourceKey& scheme, bool dora, const SourceKey& from,
                       const std::string& reason);

// Sets dataset.train_files or valid_files from paths and names on a hub; for the latter a file in data/ is
// expected.
void sample_files(Draft& draft, std::string_view field_path, const std::vector<std::string>& names,
                  const SourceKey& from);

// The value of dataset.split that sets aside a fraction of the samples for validation; 0.05 gives "19,1,0".
std::string split_with(double fraction);

}  // namespace capstan::importers
