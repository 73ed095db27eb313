// The keys of other trainers and the fields that they become, from the tables of the importers.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "importers/import.hpp"

namespace capstan::importer {

struct KeyReference {
  std::string_view key;  // as the other trainer spells it; a last `*` stands for any rest
  std::vector<std::string>
      targets;         // fields "model.vocab_size", presets "dataset (preset)"; empty: no counterpart
  std::string value;   // how the value changes; empty: as it is
  std::string reason;  // why there is no counterpart
};

// The formats whose tables are listed: Megatron-LM, Axolotl, torchtune.
std::span<const Format> referenced_formats();

// Every key of a format's table, in the table's order. Throws ErrorCode::usage for a format that is not listed.
std::vector<KeyReference> key_reference(Format format);

// docs/coming-from.md, in full.
std::string coming_from_page();

}  // namespace capstan::importer
