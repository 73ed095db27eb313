#include "text/chat/interpreter.hpp"

#include <algorithm>

namespace capstan::text::chat {

namespace {

// Increments the nesting depth during its lifetime.
class Level {
 public:
  Level(int& depth, Runtime& runtime) : depth_(depth) {
    if (++depth_ > runtime.limits().depth) {
      --depth_;
      runtime.error("nested deeper than " + std::to_string(runtime.limits().depth) +
                    " levels: a macro that calls itself?");
    }
  }
  ~Level() { --depth_; }

 private:
  int& depth_;
};

}  // namespace

void Interpreter::write(std::string_view text) {
  if (static_cast<int64_t>(sink_->size() + text.size()) > runtime_.limits().output)
    runtime_.out_of("bytes of output", runtime_.limits().output);
  runtime_.step(static_cast<int64_t>(text.size()) / 128);
  *sink_ += text;
}

std::string Interpreter::captured(const Statements& statements, Frame& frame) {
  std::string text;
  std::string* outer = std::exchange(sink_, &text);
  try {
    run(statements, frame);
  } catch (...) {
    sink_ = outer;
    throw;
  }
  sink_ = outer;
  return text;
}

Interpreter::Flow Interpreter::run(const Statements& statements, Frame& frame) {
  const Level level(depth_, runtime_);
  for (const Statement& statement : statements)
    if (const Flow flow = run_one(statement, frame); flow != Flow::next) return flow;
  return Flow::next;
}

Interpreter::Flow Interpreter::run_one(const Statement& statement, Frame& frame) {
  runtime_.at = statement.at;
  runtime_.step();
  switch (statement.kind) {
    case StatementKind::data:
      write(statement.text);
      break;
    case StatementKind::output: {
      const Value value = eval(*statement.expr, frame);
      if (const std::string* text = value.text())
        write(*text);
      else
        write(runtime_.printed(value));
      break;
    }
    case StatementKind::branch:
      for (size_t i = 0; i < statement.conditions.size(); ++i)
        if (eval(*statement.conditions[i], frame).truthy()) return run(statement.bodies[i], frame);
      if (statement.bodies.size() > statement.conditions.size()) return run(statement.bodies.back(), frame);
      break;
    case StatementKind::loop:
      return loop(statement, frame);
    case StatementKind::assign:
      assign(statement.targets, eval(*statement.expr, frame), frame);
      break;
    case StatementKind::assign_block: {
      Frame inside{&frame, {}};
      Value text = runtime_.text(captured(statement.bodies[0], inside));
      if (statement.expr) {
        inside.names.clear();
        inside.names[kBlockText] = std::move(text);
        text = eval(*statement.expr, inside);
      }
      assign(statement.targets, std::move(text), frame);
      break;
    }
    case StatementKind::macro: {
      auto node = std::make_shared<CallableNode>();
      node->macro = statement.macro.get();
      node->frame = &frame;
      node->name = statement.macro->name;
      frame.names[statement.macro->name] = Value(std::shared_ptr<const CallableNode>(std::move(node)));
      break;
    }
    case StatementKind::generation: {
      if (sink_ != &output_) runtime_.unsupported("`{% generation %}` inside of a macro or of `{% set %}`");
      Frame inside{&frame, {}};
      const size_t begin = output_.size();
      const Flow flow = run(statement.bodies[0], inside);
      generations_.emplace_back(begin, output_.size());
      return flow;
    }
    case StatementKind::break_loop:
      return Flow::leave_loop;
    case StatementKind::continue_loop:
      return Flow::next_round;
  }
  return Flow::next;
}

Interpreter::Flow Interpreter::loop(const Statement& statement, Frame& frame) {
  List items = runtime_.items_of(eval(*statement.expr, frame));
  if (!statement.conditions.empty()) {
    List chosen;
    for (Value& item : items) {
      runtime_.step();
      Frame round{&frame, {}};
      assign(statement.targets, item, round);
      if (eval(*statement.conditions[0], round).truthy()) chosen.push_back(std::move(item));
    }
    items = std::move(chosen);
  }
  if (items.empty()) {
    if (statement.bodies.size() < 2) return Flow::next;
    Frame inside{&frame, {}};
    return run(statement.bodies[1], inside);
  }
  runtime_.charge(static_cast<int64_t>(items.size() * sizeof(Value)));
  auto all = std::make_shared<ListNode>();
  all->items = std::move(items);
  const std::shared_ptr<const ListNode> shared = std::move(all);
  for (size_t i = 0; i < shared->items.size(); ++i) {
    runtime_.at = statement.at;
    runtime_.step();
    // Each iteration has its own frame, so that variables set in it do not outlive it.
    Frame round{&frame, {}};
    auto state = std::make_shared<LoopNode>();
    state->items = shared;
    state->index = static_cast<int64_t>(i);
    round.names["loop"] = Value(std::shared_ptr<const LoopNode>(std::move(state)));
    assign(statement.targets, shared->items[i], round);
    if (run(statement.bodies[0], round) == Flow::leave_loop) break;
  }
  return Flow::next;
}

void Interpreter::assign(const std::vector<Target>& targets, Value value, Frame& frame) {
  const auto one = [&](const Target& target, Value part) {
    if (target.attribute.empty()) {
      frame.names[target.name] = std::move(part);
      return;
    }
    runtime_.at = target.at;
    for (Frame* at = &frame; at; at = at->around) {
      const auto found = at->names.find(target.name);
      if (found == at->names.end()) continue;
      NamespaceNode* names = found->second.name_space();
      if (!names) break;
      // Only plain data can be stored, so that no value can contain itself.
      if (!part.is_data())
        runtime_.unsupported(std::string("a ") + part.type_name() + " inside of a namespace");
      names->attributes.set(target.attribute, std::move(part));
      return;
    }
    runtime_.error("`" + target.name + "` is not a namespace",
                   "begin with {% set " + target.name + " = namespace() %}");
  };
  if (targets.size() == 1) return one(targets[0], std::move(value));
  const List parts = runtime_.items_of(value);
  if (parts.size() != targets.size())
    runtime_.error(std::to_string(parts.size()) + " values for " + std::to_string(targets.size()) + " names");
  for (size_t i = 0; i < targets.size(); ++i) one(targets[i], parts[i]);
}

Value Interpreter::eval_or_none(const ExprPtr& expr, Frame& frame) {
  return expr ? eval(*expr, frame) : Value(None{});
}

Value Interpreter::eval(const Expr& expr, Frame& frame) {
  const Level level(depth_, runtime_);
  const size_t outer = std::exchange(runtime_.at, expr.at);
  runtime_.step();
  Value value = eval_kind(expr, frame);
  runtime_.at = outer;
  return value;
}

Value Interpreter::eval_kind(const Expr& expr, Frame& frame) {
  const auto operand = [&](size_t index) { return eval(*expr.operands[index], frame); };
  switch (expr.kind) {
    case ExprKind::constant:
      return expr.value;
    case ExprKind::name:
      return name(expr, frame);
    case ExprKind::list:
    case ExprKind::tuple: {
      List items;
      for (size_t i = 0; i < expr.operands.size(); ++i) items.push_back(operand(i));
      return runtime_.list(std::move(items), expr.kind == ExprKind::tuple);
    }
    case ExprKind::map: {
      Map map;
      for (size_t i = 0; i < expr.operands.size(); i += 2) {
        const Value key = operand(i);
        if (!key.text()) runtime_.unsupported(std::string("a dict with a key of type ") + key.type_name());
        map.set(*key.text(), operand(i + 1));
      }
      return runtime_.map(std::move(map));
    }
    case ExprKind::attribute: {
      const Value base = operand(0);
      return runtime_.attribute(base, expr.text);
    }
    case ExprKind::subscript: {
      const Value base = operand(0), key = operand(1);
      return runtime_.subscript(base, key);
    }
    case ExprKind::slice: {
      const Value base = operand(0), from = eval_or_none(expr.operands[1], frame),
                  to = eval_or_none(expr.operands[2], frame), by = eval_or_none(expr.operands[3], frame);
      return runtime_.slice(base, from, to, by);
    }
    case ExprKind::call:
      return call(expr, frame);
    case ExprKind::filter: {
      const Value value = operand(0);
      return apply_filter(runtime_, expr.text, value, arguments(expr, frame));
    }
    case ExprKind::test: {
      const Value value = operand(0);
      return Value(apply_test(runtime_, expr.text, value, arguments(expr, frame)));
    }
    case ExprKind::unary: {
      const Value value = operand(0);
      if (expr.text == "not") return Value(!value.truthy());
      if (!value.is_number())
        runtime_.error("`" + expr.text + "` cannot be applied to a " + value.type_name());
      return runtime_.binary(expr.text, Value(int64_t{0}), value);
    }
    case ExprKind::binary: {
      Value left = operand(0);
      if (expr.text == "and") return left.truthy() ? operand(1) : left;
      if (expr.text == "or") return left.truthy() ? left : operand(1);
      return runtime_.binary(expr.text, left, operand(1));
    }
    case ExprKind::concat: {
      std::string text;
      for (size_t i = 0; i < expr.operands.size(); ++i) {
        const Value part = operand(i);
        text += part.text() ? *part.text() : runtime_.printed(part);
        if (static_cast<int64_t>(text.size()) > runtime_.limits().bytes)
          runtime_.out_of("bytes of texts and lists", runtime_.limits().bytes);
      }
      return runtime_.text(std::move(text));
    }
    case ExprKind::compare:
      return compare(expr, frame);
    case ExprKind::condition:
      if (operand(1).truthy()) return operand(0);
      return expr.operands.size() > 2 ? operand(2) : Value();
  }
  return Value();
}

Value Interpreter::name(const Expr& expr, Frame& frame) {
  for (Frame* at = &frame; at; at = at->around)
    if (const auto found = at->names.find(expr.text); found != at->names.end()) return found->second;
  if (auto function = find_function(runtime_, expr.text)) return std::move(*function);
  return Value::undefined(expr.text);
}

Value Interpreter::compare(const Expr& expr, Frame& frame) {
  Value left = eval(*expr.operands[0], frame);
  for (size_t i = 0; i < expr.names.size(); ++i) {
    const std::string& op = expr.names[i];
    Value right = eval(*expr.operands[i + 1], frame);
    bool holds;
    if (op == "==" || op == "!=")
      holds = runtime_.same(left, right) == (op == "==");
    else if (op == "in" || op == "not in")
      holds = runtime_.contains(right, left) == (op == "in");
    else if (op == "<" || op == ">=")
      holds = runtime_.before(left, right) == (op == "<");
    else
      holds = runtime_.before(right, left) == (op == ">");
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Arguments Interpreter::arguments(const Expr& expr, Frame& frame) {
  Arguments result;
  for (size_t i = 1; i < expr.operands.size(); ++i)
    result.positional.push_back(eval(*expr.operands[i], frame));
  for (const auto& [name, value] : expr.keywords) result.named.emplace_back(name, eval(*value, frame));
  return result;
}

Value Interpreter::call(const Expr& expr, Frame& frame) {
  const Value callee = eval(*expr.operands[0], frame);
  const CallableNode* callable = callee.callable();
  if (!callable) {
    const Expr& named = *expr.operands[0];
    const std::string name = named.text.empty() ? "this" : "`" + named.text + "`";
    if (named.kind == ExprKind::attribute) runtime_.unsupported("the method " + name);
    if (callee.is_undefined()) runtime_.error(name + " is undefined and cannot be called");
    runtime_.error(name + " is a " + callee.type_name() + " and cannot be called");
  }
  const Arguments given = arguments(expr, frame);
  if (callable->macro) return call_macro(*callable, given);
  if (!callable->self.is_undefined()) return call_method(runtime_, callable->self, callable->name, given);
  return call_function(runtime_, callable->name, given);
}

Value Interpreter::call_macro(const CallableNode& callable, const Arguments& given) {
  const Macro& macro = *callable.macro;
  Frame inside{callable.frame, {}};
  if (given.positional.size() > macro.parameters.size())
    runtime_.error("the macro `" + macro.name + "` takes " + std::to_string(macro.parameters.size()) +
                   " arguments, not " + std::to_string(given.positional.size()));
  for (size_t i = 0; i < given.positional.size(); ++i)
    inside.names[macro.parameters[i]] = given.positional[i];
  for (const auto& [name, value] : given.named) {
    if (std::find(macro.parameters.begin(), macro.parameters.end(), name) == macro.parameters.end())
      runtime_.error("the macro `" + macro.name + "` has no argument `" + name + "`");
    if (!inside.names.emplace(name, value).second)
      runtime_.error("the macro `" + macro.name + "` gets its argument `" + name + "` twice");
  }
  const size_t plain = macro.parameters.size() - macro.defaults.size();
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    if (inside.names.count(macro.parameters[i]) > 0) continue;
    inside.names[macro.parameters[i]] =
        i < plain ? Value::undefined(macro.parameters[i]) : eval(*macro.defaults[i - plain], inside);
  }
  return runtime_.text(captured(macro.body, inside));
}

}  // namespace capstan::text::chat
