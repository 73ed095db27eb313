// The located YAML tree: text as written, with the place of every key and value. Nothing is converted here;
// what a text means is the field's business (convert.hpp). Built over yaml-cpp's event interface, behind own
// budgets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"

namespace capstan::config {

// Budgets of one file. A recipe has a few hundred values; whatever exceeds these is a mistake or an attack.
struct TreeLimits {
  static constexpr int64_t kFileBytes = 4 << 20;
  static constexpr int64_t kLineBytes = 1 << 20;
  // After aliases are expanded.
  static constexpr int64_t kNodes = 10'000;
  // Expanded to written nodes, looked at above kAliasFloor.
  static constexpr int64_t kAliasRatio = 100;
  static constexpr int64_t kAliasFloor = 1'000;
  static constexpr int kDepth = 64;
  // Brackets and commas: yaml-cpp queues a whole flow collection.
  static constexpr int64_t kFlowTokens = 50'000;
};

struct Node {
  enum class Kind : uint8_t { null, scalar, list, map };
  Kind kind = Kind::null;
  // Scalars in quotes and block scalars: text by intent, never a number.
  bool quoted = false;
  // Null because nothing was written.
  bool empty = false;
  // Text to be taken as it is: no interpolation (already resolved)
  bool raw = false;
  // Scalars, quotes and escapes removed; for null "null" or "~" as written.
  std::string text;
  // Of the value; for an alias, of the alias.
  SourceLocation location;
  // For an alias, where the value itself stands.
  SourceLocation anchor;
  // Directory that paths in this value are relative to; empty: that of its source.
  std::string base;
  // map: one for each item.
  std::vector<std::string> keys;
  std::vector<SourceLocation> key_locations;  // map: likewise
  std::vector<Node> items;                    // list, map

  static Node scalar(std::string text, SourceLocation location, bool quoted = false);
  const Node* find(std::string_view key) const;
  void add(std::string key, SourceLocation key_location, Node value);
  // Nodes, itself included.
  int64_t size() const;
};

// Readies text of a file: byte order mark off, line ends to \n.
std::string normalized(std::string text);

// One document, a mapping at its top. Everything that is wrong goes to `diagnostics` (syntax errors: the
// first, all others: all of them); nullopt when there is no tree to go on with. `sources[source]` holds the
// text.
std::optional<Node> parse_yaml(int source, const std::vector<Source>& sources,
                               std::vector<Diagnostic>& diagnostics);

// The comment block at the top of a recipe, as one line (the recipe's description); editor mode lines are
// left out.
std::string leading_comment(std::string_view text);

}  // namespace capstan::config
