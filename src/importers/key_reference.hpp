// The keys of other trainers and the fields that they become, from the tables of the importers.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "importers/import.hpp"

namespace capstan::importers {

struct KeyReference {
  // The other trainer's spelling; a final `*` matches any suffix.
  std::string_view key;
  // Fields such as "model.vocab_size" and presets such as "dataset (preset)"; empty: no counterpart.
  std::vector<std::string> targets;
  // How the value changes; empty: it is unchanged.
  std::string value;
  // Why the key has no counterpart.
  std::string reason;
};

// The formats whose tables are listed: Megatron-LM, Axolotl, torchtune.
std::span<const Format> referenced_formats();

// Every key of a format's table, in the table's order. Throws ErrorCode::usage for a format that is not
// listed.
std::vector<KeyReference> key_reference(Format format);

// The text of docs/coming-from.md, with markers of actions (base/actions.hpp).
std::string coming_from_page();

}  // namespace capstan::importers
