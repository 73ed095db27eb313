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

// The kinds of expressions, each with the fields of Expr that it uses. `o` stands for operands, `args` for
// the operands that follow and the keywords:
//
//   constant   value                        attribute   o[0] . text
//   name       text                         subscript   o[0] [ o[1] ]
//   list       o                            slice       o[0] [ o[1] : o[2] : o[3] ], each may be null
//   tuple      o                            call        o[0] ( args )
//   map        o: key, value, key, value …  filter      o[0] | text ( args )
//   unary      text o[0], text: - + not     test        o[0] is text ( o[1] … )
//   concat     o joined by ~                compare     o[0] names[0] o[1] names[1] …
//   binary     o[0] text o[1], text: + - * / // % ** and or
//   condition  o[0] if o[1] else o[2], which may be missing
enum class ExprKind : uint8_t {
  constant,
  name,
  list,
  tuple,
  map,
  attribute,
  subscript,
  slice,
  call,
  filter,
  test,
  unary,
  binary,
  concat,
  compare,
  condition,
};

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;
struct Expr {
  ExprKind kind;
  // Byte offset in the source.
  size_t at;
  // Nesting depth of the expression.
  int depth = 1;
  std::string text;
  Value value;
  std::vector<ExprPtr> operands;
  std::vector<std::pair<std::string, ExprPtr>> keywords;
  std::vector<std::string> names;
};

// The kinds of statements, each with the fields of Statement that it uses:
//
//   data           text
//   output         expr
//   branch         conditions[i] → bodies[i]; the else branch is one body more
//   loop           for targets in expr (if conditions[0]): bodies[0], else bodies[1]
//   assign         targets = expr
//   assign_block   targets[0] = the output of bodies[0] through the filters of expr (null: no filters)
//   macro          macro
//   generation     bodies[0], the text that the assistant writes
enum class StatementKind : uint8_t {
  data,
  output,
  branch,
  loop,
  assign,
  assign_block,
  macro,
  generation,
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
  // Default values of the last parameters.
  std::vector<ExprPtr> defaults;
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

// Name of the variable that an assign_block's filters apply to: the output of the block.
inline constexpr const char* kBlockText = "\x01";

// Parses a template. Throws ErrorCode::format for syntax errors of Jinja2, and ::unsupported, with name and
// location, for statements that this subset lacks.
Statements parse(const Source& source);

}  // namespace capstan::text::chat
