// The override grammar of the command line:
//   a.b=c   +a.b=c   ++a.b=c   ~a.b   ~a.b=c   a.b+=x   list[0]=x   list[-1]=x   items[name=code].weight=2
//   @file   section=@file   and the long forms --set k=v, --append k=v, --unset k, -f FILE
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

// One override as given: a bare word, or the argument of a flag.
struct Override {
  enum class Kind : unsigned char { token, set, append, unset, file };
  Kind kind = Kind::token;
  std::string text;
  static Override token(std::string text) { return {Kind::token, std::move(text)}; }
  static Override file(std::string path) { return {Kind::file, std::move(path)}; }
};

struct Segment {
  // A, [0] (and .0), [name=code].
  enum class Kind : unsigned char { name, index, id };
  Kind kind = Kind::name;
  // Name; id: the field.
  std::string name;
  // id: its value.
  std::string text;
  // Negative counts from the end.
  long long index = 0;
};

struct ParsedPath {
  std::vector<Segment> segments;
  SourceLocation location;
  // As it would be written.
  std::string text() const;
};

struct ParsedOverride {
  enum class Op : unsigned char { set, add, force, unset, append, include };
  Op op = Op::set;
  // Empty for an include at the root.
  ParsedPath path;
  // Set, add, force, append; unset with a value to match.
  std::optional<Node> value;
  // Where the value would stand, also when it is empty.
  SourceLocation value_location;
  std::string file;  // include
  // Of the whole token.
  SourceLocation location;
};

// `line` is the override's line in the command-line source (from 1). nullopt: reported.
std::optional<ParsedOverride> parse_override(const Override& given, const std::string* next_token, int source,
                                             int line, std::vector<Diagnostic>& diagnostics);

// A value as the right side of an override: a scalar, "[a, b]", "{k: v}", quoted text. Also for tests and
// tools.
std::optional<Node> parse_value(std::string_view text, SourceLocation location,
                                std::vector<Diagnostic>& diagnostics);

// `a.b[0]."c.d"`, for show and explain. `error` gets the reason.
std::optional<ParsedPath> parse_path(std::string_view text, SourceLocation location,
                                     std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
