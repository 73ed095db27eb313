// A parsed template: expressions and statements.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/chat/source.hpp"
#include "text/chat/value.hpp"

namespace capstan::text::chat {

enum class ExprKind : uint8_t {
  constant,   // value
  name,       // text
  list,       // operands
  tuple,      // operands
  map,        // operands: key, value, key, value …
  attribute,  // operands[0] . text
  subscript,  // operands[0] [ operands[1] ]
  slice,      // operands[0] [ operands[1] : operands[2] : operands[3] ], each of the three may be null
  call,       // operands[0] ( the other operands, keywords )
  filter,     // operands[0] | text ( the other operands, keywords )
  test,       // operands[0] is text ( the other operands )
  unary,      // text operands[0]: - + not
  binary,     // operands[0] text operands[1]: + - * / // % ** and or
  concat,     // operands joined by ~
  compare,    // operands[0] names[0] operands[1] names[1] …
  condition,  // operands[0] if operands[1] else operands[2] (may be missing)
};

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;
struct Expr {
  ExprKind kind;
  size_t at;      // in the source
  int depth = 1;  // of expressions inside one another
  std::string text;
  Value value;
  std::vector<ExprPtr> operands;
  std::vector<std::pair<std::string, ExprPtr>> keywords;
  std::vector<std::string> names;
};

enum class StatementKind : uint8_t {
  data,          // text
  output,        // expr
  branch,        // conditions[i] → bodies[i]; one body more is the else
  loop,          // for targets in expr (if conditions[0]): bodies[0], else bodies[1]
  assign,        // targets = expr
  assign_block,  // targets[0] = what bodies[0] prints, through the filters of expr (null: none)
  macro,         // macro
  generation,    // bodies[0] is what the assistant says
  break_loop,
  continue_loop,
};

struct Statement;
using Statements = std::vector<Statement>;

// `name`, or `name.attribute` of a namespace.
struct Target {
  std::string name, attribute;
  size_t at = 0;
};

struct Macro {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // of the last parameters
  Statements body;
};

struct Statement {
  StatementKind kind;
  size_t at;
  std::string text;
  ExprPtr expr;
  std::vector<ExprPtr> conditions;
  std::vector<Statements> bodies;
  std::vector<Target> targets;
  std::unique_ptr<Macro> macro;
};

// The operand that an assign_block's filters begin with: the text of the block.
inline constexpr const char* kBlockText = "\x01";

// ErrorCode::format for what is not Jinja2, ::unsupported for what this subset lacks, by name and place.
Statements parse(const Source& source);

}  // namespace capstan::text::chat
