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
  enum class Kind : unsigned char { name, index, id };  // a, [0] (and .0), [name=code]
  Kind kind = Kind::name;
  std::string name;     // name; id: the field
  std::string text;     // id: its value
  long long index = 0;  // negative counts from the end
};

struct ParsedPath {
  std::vector<Segment> segments;
  Place place;
  std::string text() const;  // as it would be written
};

struct ParsedOverride {
  enum class Op : unsigned char { set, add, force, unset, append, include };
  Op op = Op::set;
  ParsedPath path;            // empty for an include at the root
  std::optional<Node> value;  // set, add, force, append; unset with a value to match
  Place value_place;          // where the value would stand, also when it is empty
  std::string file;           // include
  Place place;                // of the whole token
};

// `line` is the override's line in the command-line source (from 1). nullopt: reported.
std::optional<ParsedOverride> parse_override(const Override& given, const std::string* next_token, int source,
                                             int line, std::vector<Diagnostic>& diagnostics);

// A value as the right side of an override: a scalar, "[a, b]", "{k: v}", quoted text. Also for tests and tools.
std::optional<Node> parse_value(std::string_view text, Place place, std::vector<Diagnostic>& diagnostics);

// `a.b[0]."c.d"`, for show and explain. `error` gets the reason.
std::optional<ParsedPath> parse_path(std::string_view text, Place place,
                                     std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
