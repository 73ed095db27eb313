// The located YAML tree: text as written, with locations of keys and values. Nothing is converted here:
// convert.hpp converts a text by the type of its field. Built over yaml-cpp's event interface, with limits of
// size and depth.
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
  // Maximum number of nodes after aliases are expanded.
  static constexpr int64_t kNodes = 10'000;
  // Maximum ratio of expanded nodes to written nodes; checked above kAliasFloor nodes.
  static constexpr int64_t kAliasRatio = 100;
  static constexpr int64_t kAliasFloor = 1'000;
  static constexpr int kMaxDepth = 64;
  // Maximum number of brackets and commas, because yaml-cpp queues a flow collection until it ends.
  static constexpr int64_t kFlowTokens = 50'000;
};

struct Node {
  enum class Kind : uint8_t { null, scalar, list, map };
  Kind kind = Kind::null;
  // Whether the scalar is in quotes or is a block scalar: then it is a text and never a number.
  bool quoted = false;
  // Whether the value is null because no value was written.
  bool empty = false;
  // Whether the text is resolved already, so that it is not interpolated.
  bool raw = false;
  // Text of a scalar without quotes and escapes. For null, "null" or "~" as written.
  std::string text;
  // Location of the value. If the value is an alias, location of the alias.
  SourceLocation location;
  // If the value is an alias, location of the value that it refers to.
  SourceLocation anchor;
  // Directory to which paths in this value are relative. Empty: that of its source.
  std::string base;
  // Keys of a map and their locations, one for each item.
  std::vector<std::string> keys;
  std::vector<SourceLocation> key_locations;
  // Items of a list or values of a map.
  std::vector<Node> items;

  static Node scalar(std::string text, SourceLocation location, bool quoted = false);
  const Node* find(std::string_view key) const;
  void add(std::string key, SourceLocation key_location, Node value);
  // Number of nodes, including this one.
  int64_t size() const;
};

// Removes the byte order mark of a file's text and converts line ends to \n.
std::string normalized(std::string text);

// Parses one document with a mapping at its top. Adds everything that is wrong to `diagnostics`: only the
// first syntax error, and all other errors. Returns nullopt if there is no usable tree. `sources[source]`
// holds the text.
std::optional<Node> parse_yaml(int source, const std::vector<Source>& sources,
                               std::vector<Diagnostic>& diagnostics);

// The comment block at the top of a recipe, as one line (the recipe's description); editor mode lines are
// left out.
std::string leading_comment(std::string_view text);

}  // namespace capstan::config
