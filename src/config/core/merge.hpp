// Merges writes into the node of one field: lists are replaced, maps are merged, `+=` appends, and an index
// or a key changes one item.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/core/compose.hpp"
#include "config/core/field.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

// A default value as a node, so that it can be appended to.
Node node_from_value(const Type& type, const Value& value);

// Applies `write` to `node` (nullopt: still the default). False: reported.
bool apply_write(std::optional<Node>& node, const Write& write, std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
