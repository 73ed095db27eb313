// Runs the statements of a template.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "text/chat/runtime.hpp"
#include "text/chat/syntax.hpp"

namespace capstan::text::chat {

// The names that a block defines, and the frame of the enclosing block.
struct Frame {
  Frame* around = nullptr;
  std::map<std::string, Value, std::less<>> names;
};

class Interpreter {
 public:
  Interpreter(const Source& source, const Limits& limits, std::optional<std::tm> now)
      : runtime_(source, limits, now) {}

  Runtime& runtime() { return runtime_; }
  // How a sequence of statements ends: normally, with `break` or with `continue`.
  enum class Flow : uint8_t { next, leave_loop, next_round };
  Flow run(const Statements& statements, Frame& frame);

  const std::string& output() const { return output_; }
  // Bytes [first, second) of the output that `{% generation %}` blocks printed.
  const std::vector<std::pair<size_t, size_t>>& generations() const { return generations_; }

 private:
  Flow run_one(const Statement& statement, Frame& frame);
  Flow loop(const Statement& statement, Frame& frame);
  void assign(const std::vector<Target>& targets, Value value, Frame& frame);
  std::string captured(const Statements& statements, Frame& frame);
  void write(std::string_view text);

  Value eval(const Expr& expr, Frame& frame);
  Value eval_kind(const Expr& expr, Frame& frame);
  Value eval_or_none(const ExprPtr& expr, Frame& frame);
  Value name(const Expr& expr, Frame& frame);
  Value compare(const Expr& expr, Frame& frame);
  Value call(const Expr& expr, Frame& frame);
  Value call_macro(const CallableNode& callable, const Arguments& arguments);
  Arguments arguments(const Expr& expr, Frame& frame);

  Runtime runtime_;
  std::string output_;
  std::string* sink_ = &output_;
  std::vector<std::pair<size_t, size_t>> generations_;
  int depth_ = 0;
};

}  // namespace capstan::text::chat
