// Grammar and precedence follow Jinja2's parser.py, without the parts that chat templates do not use.
#include <algorithm>
#include <charconv>

#include "base/text.hpp"
#include "text/chat/lexer.hpp"
#include "text/chat/syntax.hpp"

namespace capstan::text::chat {

namespace {

// Limit of nested expressions, and of nested statements.
constexpr int kMaxDepth = 100;

class Parser {
 public:
  explicit Parser(const Source& source) : source_(source), tokens_(tokenize(source)) {}

  Statements run() {
    Statements result = statements({});
    if (now().kind != TokenKind::end) bad("there is more than the template");
    return result;
  }

 private:
  // --- tokens

  const Token& now() const { return tokens_[next_]; }
  const Token& after() const { return tokens_[std::min(next_ + 1, tokens_.size() - 1)]; }
  bool is_op(std::string_view text) const { return now().kind == TokenKind::op && now().text == text; }
  bool is_word(std::string_view text) const { return now().kind == TokenKind::name && now().text == text; }
  bool skip_op(std::string_view text) {
    if (!is_op(text)) return false;
    ++next_;
    return true;
  }
  bool skip_word(std::string_view text) {
    if (!is_word(text)) return false;
    ++next_;
    return true;
  }
  std::string written() const {
    switch (now().kind) {
      case TokenKind::end:
        return "the end of the template";
      case TokenKind::text:
        return "a text";
      default:
        return "`" + now().text + "`";
    }
  }
  [[noreturn]] void bad(const std::string& what) const { source_.fail_at(now().at, what); }
  [[noreturn]] void unsupported(size_t at, const std::string& what, std::string help = {}) const {
    source_.fail_at(at, what + " is not supported in chat templates here", ErrorCode::unsupported,
                    std::move(help));
  }
  void expect_op(std::string_view text) {
    if (!skip_op(text)) bad("expected `" + std::string(text) + "`, not " + written());
  }
  std::string expect_name() {
    if (now().kind != TokenKind::name) bad("expected a name, not " + written());
    return tokens_[next_++].text;
  }
  void expect_block_end() {
    if (now().kind != TokenKind::block_end) bad("expected `%}`, not " + written());
    ++next_;
  }

  struct NestingLevel {
    explicit NestingLevel(Parser& owner) : parser(owner) {
      if (parser.depth_ == kMaxDepth)
        parser.source_.fail_at(parser.now().at,
                               "nested deeper than " + std::to_string(kMaxDepth) + " levels");
      ++parser.depth_;
    }
    ~NestingLevel() { --parser.depth_; }
    Parser& parser;
  };

  // --- expressions

  ExprPtr make(ExprKind kind, size_t at, std::vector<ExprPtr> operands = {}, std::string text = {}) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->at = at;
    expr->text = std::move(text);
    expr->operands = std::move(operands);
    for (const ExprPtr& operand : expr->operands)
      if (operand) expr->depth = std::max(expr->depth, operand->depth + 1);
    if (expr->depth > kMaxDepth)
      source_.fail_at(at, "an expression of more than " + std::to_string(kMaxDepth) + " levels");
    return expr;
  }
  template <class... Operands>
  static std::vector<ExprPtr> of(Operands... operands) {
    std::vector<ExprPtr> result;
    (result.push_back(std::move(operands)), ...);
    return result;
  }

  ExprPtr expression() {
    const NestingLevel level(*this);
    ExprPtr value = disjunction();
    while (is_word("if")) {
      const size_t at = tokens_[next_++].at;
      ExprPtr condition = disjunction();
      auto operands = of(std::move(value), std::move(condition));
      if (skip_word("else")) operands.push_back(expression());
      value = make(ExprKind::condition, at, std::move(operands));
    }
    return value;
  }
  ExprPtr disjunction() {
    return left_binary({"or"}, [&] { return conjunction(); });
  }
  ExprPtr conjunction() {
    return left_binary({"and"}, [&] { return negation(); });
  }
  ExprPtr negation() {
    if (!is_word("not")) return comparison();
    const NestingLevel level(*this);
    const size_t at = tokens_[next_++].at;
    return make(ExprKind::unary, at, of(negation()), "not");
  }
  ExprPtr comparison() {
    const size_t at = now().at;
    auto operands = of(sum());
    std::vector<std::string> names;
    for (;;) {
      if (now().kind == TokenKind::op &&
          (is_op("==") || is_op("!=") || is_op("<") || is_op("<=") || is_op(">") || is_op(">="))) {
        names.push_back(tokens_[next_++].text);
      } else if (skip_word("in")) {
        names.push_back("in");
      } else if (is_word("not") && after().kind == TokenKind::name && after().text == "in") {
        next_ += 2;
        names.push_back("not in");
      } else {
        break;
      }
      operands.push_back(sum());
    }
    if (names.empty()) return std::move(operands[0]);
    ExprPtr result = make(ExprKind::compare, at, std::move(operands));
    result->names = std::move(names);
    return result;
  }
  template <class Next>
  ExprPtr left_binary(std::initializer_list<std::string_view> ops, Next next) {
    ExprPtr left = next();
    for (;;) {
      const auto op =
          std::find_if(ops.begin(), ops.end(), [&](std::string_view o) { return is_op(o) || is_word(o); });
      if (op == ops.end()) return left;
      const size_t at = tokens_[next_++].at;
      left = make(ExprKind::binary, at, of(std::move(left), next()), std::string(*op));
    }
  }
  ExprPtr sum() {
    return left_binary({"+", "-"}, [&] { return concat(); });
  }
  ExprPtr concat() {
    const size_t at = now().at;
    auto operands = of(product());
    while (skip_op("~")) operands.push_back(product());
    return operands.size() == 1 ? std::move(operands[0]) : make(ExprKind::concat, at, std::move(operands));
  }
  ExprPtr product() {
    return left_binary({"*", "/", "//", "%"}, [&] { return power(); });
  }
  ExprPtr power() {
    return left_binary({"**"}, [&] { return unary(true); });
  }
  ExprPtr unary(bool with_filters) {
    ExprPtr value;
    if (is_op("-") || is_op("+")) {
      const NestingLevel level(*this);
      const Token& sign = tokens_[next_++];
      value = make(ExprKind::unary, sign.at, of(unary(false)), sign.text);
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return with_filters ? filters(std::move(value)) : std::move(value);
  }

  // Parses items separated by commas, with an optional trailing comma, up to and including `close`.
  template <class Read>
  void comma_list(std::string_view close, Read read) {
    for (bool first = true; !is_op(close); first = false) {
      if (!first) {
        expect_op(",");
        if (is_op(close)) break;
      }
      read();
    }
    expect_op(close);
  }

  ExprPtr constant(size_t at, Value value) {
    ExprPtr result = make(ExprKind::constant, at);
    result->value = std::move(value);
    return result;
  }
  ExprPtr primary() {
    const Token& token = now();
    const size_t at = token.at;
    switch (token.kind) {
      case TokenKind::name:
        ++next_;
        if (token.text == "true" || token.text == "True") return constant(at, Value(true));
        if (token.text == "false" || token.text == "False") return constant(at, Value(false));
        if (token.text == "none" || token.text == "None") return constant(at, Value(None{}));
        return make(ExprKind::name, at, {}, token.text);
      case TokenKind::text: {
        std::string text;
        while (now().kind == TokenKind::text) text += tokens_[next_++].text;
        return constant(at, Value(std::move(text)));
      }
      case TokenKind::integer: {
        ++next_;
        const auto value = parse_int(token.text);
        if (!value) source_.fail_at(at, "a number that does not fit 64 bits");
        return constant(at, Value(*value));
      }
      case TokenKind::real: {
        ++next_;
        const auto value = parse_double(token.text);
        if (!value) source_.fail_at(at, "not a number");
        return constant(at, Value(*value));
      }
      default:
        break;
    }
    if (skip_op("(")) {
      ExprPtr inside = tuple(true);
      expect_op(")");
      return inside;
    }
    std::vector<ExprPtr> items;
    if (skip_op("[")) {
      comma_list("]", [&] { items.push_back(expression()); });
      return make(ExprKind::list, at, std::move(items));
    }
    if (skip_op("{")) {
      comma_list("}", [&] {
        items.push_back(expression());
        expect_op(":");
        items.push_back(expression());
      });
      return make(ExprKind::map, at, std::move(items));
    }
    bad("expected an expression, not " + written());
  }
  // Parses expressions separated by commas as a tuple; a single expression without a comma is returned
  // itself.
  ExprPtr tuple(bool may_be_empty) {
    const NestingLevel level(*this);
    const size_t at = now().at;
    std::vector<ExprPtr> items;
    bool commas = false;
    const auto at_end = [&] {
      return now().kind == TokenKind::variable_end || now().kind == TokenKind::block_end || is_op(")");
    };
    while (!at_end()) {
      items.push_back(expression());
      if (!skip_op(",")) break;
      commas = true;
    }
    if (!commas && items.size() == 1) return std::move(items[0]);
    if (items.empty() && !may_be_empty) bad("expected an expression, not " + written());
    return make(ExprKind::tuple, at, std::move(items));
  }

  ExprPtr postfix(ExprPtr value) {
    for (;;) {
      const size_t at = now().at;
      if (skip_op(".")) {
        if (now().kind == TokenKind::integer) {
          const Token& token = tokens_[next_++];
          const auto index = parse_int(token.text);
          if (!index) source_.fail_at(at, "a number that does not fit 64 bits");
          value = make(ExprKind::subscript, at, of(std::move(value), constant(token.at, Value(*index))));
        } else {
          value = make(ExprKind::attribute, at, of(std::move(value)), expect_name());
        }
      } else if (is_op("[")) {
        ++next_;
        value = subscript(std::move(value), at);
      } else if (is_op("(")) {
        value = call(std::move(value), at);
      } else {
        return value;
      }
    }
  }
  ExprPtr subscript(ExprPtr value, size_t at) {
    const NestingLevel level(*this);
    ExprPtr bounds[3];
    if (!is_op(":")) bounds[0] = expression();
    if (bounds[0] && skip_op("]"))
      return make(ExprKind::subscript, at, of(std::move(value), std::move(bounds[0])));
    expect_op(":");
    if (!is_op(":") && !is_op("]")) bounds[1] = expression();
    if (skip_op(":") && !is_op("]")) bounds[2] = expression();
    if (is_op(",")) unsupported(now().at, "a subscript of several parts");
    expect_op("]");
    return make(ExprKind::slice, at,
                of(std::move(value), std::move(bounds[0]), std::move(bounds[1]), std::move(bounds[2])));
  }
  // Parses the arguments `( … )` of a call, a filter or a test, into which the value before them is the first
  // operand.
  void arguments(Expr& into) {
    expect_op("(");
    comma_list(")", [&] {
      if (is_op("*") || is_op("**")) unsupported(now().at, "unpacking of arguments");
      ExprPtr value;
      if (now().kind == TokenKind::name && after().kind == TokenKind::op && after().text == "=") {
        std::string name = now().text;
        next_ += 2;
        value = expression();
        into.depth = std::max(into.depth, value->depth + 1);
        into.keywords.emplace_back(std::move(name), std::move(value));
      } else {
        if (!into.keywords.empty()) bad("a positional argument after a named one");
        value = expression();
        into.depth = std::max(into.depth, value->depth + 1);
        into.operands.push_back(std::move(value));
      }
    });
    if (into.depth > kMaxDepth)
      source_.fail_at(into.at, "an expression of more than " + std::to_string(kMaxDepth) + " levels");
  }
  ExprPtr call(ExprPtr value, size_t at) {
    const NestingLevel level(*this);
    ExprPtr result = make(ExprKind::call, at, of(std::move(value)));
    arguments(*result);
    return result;
  }
  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
  }
  ExprPtr filter(ExprPtr value, size_t at) {
    std::string name = dotted_name();
    ExprPtr result = make(ExprKind::filter, at, of(std::move(value)), std::move(name));
    if (is_op("(")) arguments(*result);
    return result;
  }
  ExprPtr filters(ExprPtr value) {
    for (;;) {
      const size_t at = now().at;
      if (skip_op("|"))
        value = filter(std::move(value), at);
      else if (skip_word("is"))
        value = test(std::move(value), at);
      else if (is_op("("))
        value = call(std::move(value), at);
      else
        return value;
    }
  }
  ExprPtr test(ExprPtr value, size_t at) {
    const bool negated = skip_word("not");
    std::string name = dotted_name();
    ExprPtr result = make(ExprKind::test, at, of(std::move(value)), std::move(name));
    const TokenKind kind = now().kind;
    if (is_op("(")) {
      arguments(*result);
    } else if ((kind == TokenKind::name && !is_word("else") && !is_word("or") && !is_word("and") &&
                !is_word("is") && !is_word("if") && !is_word("not") && !is_word("in")) ||
               kind == TokenKind::text || kind == TokenKind::integer || kind == TokenKind::real ||
               is_op("[") || is_op("{")) {
      const NestingLevel level(*this);
      ExprPtr operand = postfix(primary());
      result->depth = std::max(result->depth, operand->depth + 1);
      result->operands.push_back(std::move(operand));
    }
    return negated ? make(ExprKind::unary, at, of(std::move(result)), "not") : std::move(result);
  }

  // --- statements

  bool ends_here(std::initializer_list<std::string_view> ends) const {
    return now().kind == TokenKind::block_begin && after().kind == TokenKind::name &&
           std::find(ends.begin(), ends.end(), after().text) != ends.end();
  }

  // Parses statements up to one of `ends`, and consumes its `{%` and its word.
  Statements statements(std::initializer_list<std::string_view> ends, std::string* end = nullptr) {
    const NestingLevel level(*this);
    Statements result;
    const size_t opened = next_ > 0 ? tokens_[next_ - 1].at : 0;
    for (;;) {
      const Token& token = now();
      if (ends_here(ends)) {
        ++next_;
        std::string word = expect_name();
        if (end) *end = std::move(word);
        return result;
      }
      switch (token.kind) {
        case TokenKind::end:
          if (ends.size() > 0)
            source_.fail_at(opened,
                            "this tag is never closed with `{% " + std::string(*(ends.end() - 1)) + " %}`");
          return result;
        case TokenKind::data:
          result.push_back(make_statement(StatementKind::data, token.at));
          result.back().text = token.text;
          ++next_;
          break;
        case TokenKind::variable_begin:
          ++next_;
          result.push_back(make_statement(StatementKind::output, token.at));
          result.back().expr = tuple(false);
          if (now().kind != TokenKind::variable_end) bad("expected `}}`, not " + written());
          ++next_;
          break;
        default:
          ++next_;
          result.push_back(statement());
      }
    }
  }

  static Statement make_statement(StatementKind kind, size_t at) {
    Statement result;
    result.kind = kind;
    result.at = at;
    return result;
  }

  Statement statement() {
    const size_t at = now().at;
    const std::string word = expect_name();
    if (word == "if") return branch(at);
    if (word == "for") return loop(at);
    if (word == "set") return assign(at);
    if (word == "macro") return macro(at);
    if (word == "generation") {
      expect_block_end();
      Statement result = make_statement(StatementKind::generation, at);
      result.bodies.push_back(statements({"endgeneration"}));
      expect_block_end();
      return result;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) source_.fail_at(at, "`" + word + "` outside of a loop");
      expect_block_end();
      return make_statement(word == "break" ? StatementKind::break_loop : StatementKind::continue_loop, at);
    }
    if (word.starts_with("end") || word == "else" || word == "elif")
      source_.fail_at(at, "`{% " + word + " %}` closes nothing here");
    unsupported(at, "the statement `{% " + word + " %}`",
                "statements: if, for, set, macro, break, continue, generation, raw");
  }

  Statement branch(size_t at) {
    Statement result = make_statement(StatementKind::branch, at);
    std::string end = "elif";
    while (end == "elif") {
      result.conditions.push_back(tuple(false));
      expect_block_end();
      result.bodies.push_back(statements({"elif", "else", "endif"}, &end));
    }
    if (end == "else") {
      expect_block_end();
      result.bodies.push_back(statements({"endif"}));
    }
    expect_block_end();
    return result;
  }

  Target target() {
    Target result;
    result.at = now().at;
    result.name = expect_name();
    for (const std::string_view reserved :
         {"true", "false", "none", "True", "False", "None", "not", "and", "or", "in", "is", "if", "else"})
      if (result.name == reserved) source_.fail_at(result.at, "`" + result.name + "` cannot be assigned to");
    if (skip_op(".")) result.attribute = expect_name();
    return result;
  }
  // `a`, `a, b` or `(a, b)`.
  std::vector<Target> targets() {
    const bool brackets = skip_op("(");
    std::vector<Target> result{target()};
    while (skip_op(",")) {
      if (is_op("(")) unsupported(now().at, "unpacking inside of unpacking");
      result.push_back(target());
    }
    if (brackets) expect_op(")");
    return result;
  }

  Statement loop(size_t at) {
    Statement result = make_statement(StatementKind::loop, at);
    result.targets = targets();
    for (const Target& one : result.targets)
      if (!one.attribute.empty()) source_.fail_at(one.at, "a loop cannot assign to an attribute");
    if (!skip_word("in")) bad("expected `in`, not " + written());
    result.expr = loop_items();
    if (skip_word("if")) result.conditions.push_back(expression());
    if (is_word("recursive")) unsupported(now().at, "a recursive loop");
    expect_block_end();
    ++loops_;
    std::string end;
    result.bodies.push_back(statements({"else", "endfor"}, &end));
    --loops_;
    if (end == "else") {
      expect_block_end();
      result.bodies.push_back(statements({"endfor"}));
    }
    expect_block_end();
    return result;
  }
  // A following `if` belongs to the loop.
  ExprPtr loop_items() {
    const size_t at = now().at;
    auto items = of(disjunction());
    if (!is_op(",")) return std::move(items[0]);
    while (skip_op(",")) items.push_back(disjunction());
    return make(ExprKind::tuple, at, std::move(items));
  }

  Statement assign(size_t at) {
    Statement result = make_statement(StatementKind::assign, at);
    result.targets = targets();
    if (skip_op("=")) {
      result.expr = tuple(false);
      expect_block_end();
      return result;
    }
    if (result.targets.size() != 1) bad("expected `=`, not " + written());
    result.kind = StatementKind::assign_block;
    if (is_op("|")) result.expr = filters(make(ExprKind::name, now().at, {}, kBlockText));
    expect_block_end();
    const int outer = std::exchange(loops_, 0);
    result.bodies.push_back(statements({"endset"}));
    loops_ = outer;
    expect_block_end();
    return result;
  }

  Statement macro(size_t at) {
    Statement result = make_statement(StatementKind::macro, at);
    result.macro = std::make_unique<Macro>();
    Macro& macro = *result.macro;
    macro.name = expect_name();
    expect_op("(");
    while (!is_op(")")) {
      if (!macro.parameters.empty()) expect_op(",");
      macro.parameters.push_back(expect_name());
      if (skip_op("="))
        macro.defaults.push_back(expression());
      else if (!macro.defaults.empty())
        bad("a parameter without a default after one with a default");
    }
    expect_op(")");
    expect_block_end();
    const int outer = std::exchange(loops_, 0);
    macro.body = statements({"endmacro"});
    loops_ = outer;
    // `endmacro` may be followed by the name.
    if (now().kind == TokenKind::name) ++next_;
    expect_block_end();
    return result;
  }

  const Source& source_;
  std::vector<Token> tokens_;
  size_t next_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

Statements parse(const Source& source) {
  return Parser(source).run();
}

}  // namespace capstan::text::chat
