// What fine-tuning needs, by whatever names other trainers have it: the base model's weights and tokenizer,
// the layers that are adapted, samples in JSON lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "importers/rule.hpp"

namespace capstan::importers {

// A path of some machine, not a name on a hub.
bool is_path(std::string_view name);

// Weights as another program keeps them, and the tokenizer beside them. For a name on a hub, the directory
// that they are expected in.
void base_weights(Draft& draft, const std::string& name, const From& from);
void tokenizer_of_base(Draft& draft);
// Where checkpoints go, by the key `save`, and the ones that another program would go on from.
void save_and_load(Reader& reader, std::string_view save, std::string_view load);

// Modules by the names of Transformers and torchtune (`q_proj`, `w1`, `c_attn`). Where q, k and v are modules
// of their own, each has an adapter of its own; names that are no module of the layers are listed.
struct AdaptedModules {
  std::vector<config::Node> modules;
  From from;
  // Who chooses adapters.
  From scheme;
  bool dora = false;
  // Numbers; empty: all.
  std::vector<config::Node> layers;
};
void adapt_modules(Draft& draft, const AdaptedModules& adapted);
// All of them, in a model of this preset; `reason` where the file says nothing, else `from` says it.
void adapt_all_modules(Draft& draft, const From& scheme, bool dora, const From& from,
                       const std::string& reason);

// dataset.train_files or valid_files from paths and names on a hub, of which a file is expected in data/.
void sample_files(Draft& draft, std::string_view field_path, const std::vector<std::string>& names,
                  const From& from);

// A part of the samples set aside for validation: 0.05 is 19 of 20.
std::string split_with(double share);

}  // namespace capstan::importers
