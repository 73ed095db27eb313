// The keys of other trainers and the fields that they become, from the tables of the importers.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "importers/import.hpp"

namespace capstan::importers {

struct KeyReference {
  // As the other trainer spells it; a last `*` stands for any rest.
  std::string_view key;
  // Fields "model.vocab_size", presets "dataset (preset)"; empty: no counterpart.
  std::vector<std::string> targets;
  // How the value changes; empty: as it is.
  std::string value;
  // Why there is no counterpart.
  std::string reason;
};

// The formats whose tables are listed: Megatron-LM, Axolotl, torchtune.
std::span<const Format> referenced_formats();

// Every key of a format's table, in the table's order. Throws ErrorCode::usage for a format that is not
// listed.
std::vector<KeyReference> key_reference(Format format);

// docs/coming-from.md, in full.
std::string coming_from_page();

}  // namespace capstan::importers
