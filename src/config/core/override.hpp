// The override grammar of the command line:
//   a.b=c   +a.b=c   ++a.b=c   ~a.b   ~a.b=c   a.b+=x   list[0]=x   list[-1]=x   items[name=code].weight=2
//   @file   section=@file
// Override::Kind names the long forms, which the command line gives as options.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

// One override as given: a bare word, or the argument of an option.
struct Override {
  enum class Kind : unsigned char { token, set, append, unset, file };
  Kind kind = Kind::token;
  std::string text;
  static Override token(std::string text) { return {Kind::token, std::move(text)}; }
  static Override file(std::string path) { return {Kind::file, std::move(path)}; }
};
// The override as one word, whatever its kind: `a.b=c`, `a.b+=x`, `~a.b` or `@FILE`.
std::string token_text(const Override& override);

struct Segment {
  // `a`, `[0]` (also written `.0`), and `[name=code]`.
  enum class Kind : unsigned char { name, index, id };
  Kind kind = Kind::name;
  // The name; for `id`, the name of the field.
  std::string name;
  // The value of the field, for `id`.
  std::string text;
  // The index. A negative index counts from the end.
  long long index = 0;
};

struct ParsedPath {
  std::vector<Segment> segments;
  SourceLocation location;
  // The path as a user would write it.
  std::string text() const;
};

struct ParsedOverride {
  enum class Op : unsigned char { set, add, force, unset, append, include };
  Op op = Op::set;
  // Path of the field. Empty for an include at the root.
  ParsedPath path;
  // Value of set, add, force and append; for unset, the value to match, if one is given.
  std::optional<Node> value;
  // Location of the value, also if the value is empty.
  SourceLocation value_location;
  // The file that an `include` names.
  std::string file;
  // Location of the complete token.
  SourceLocation location;
};

// Parses an override. `line` is its line in the command-line source, from 1. Returns nullopt after it has
// reported an error.
std::optional<ParsedOverride> parse_override(const Override& given, const std::string* next_token, int source,
                                             int line, std::vector<Diagnostic>& diagnostics);

// Parses the right side of an override: a scalar, "[a, b]", "{k: v}" or quoted text. Tests and tools use it
// too.
std::optional<Node> parse_value(std::string_view text, SourceLocation location,
                                std::vector<Diagnostic>& diagnostics);

// Parses a path such as `a.b[0]."c.d"`, for show and explain. Adds errors to `diagnostics`.
std::optional<ParsedPath> parse_path(std::string_view text, SourceLocation location,
                                     std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
