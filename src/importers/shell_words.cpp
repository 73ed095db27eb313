#include "importers/shell_words.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/text.hpp"
#include "importers/shell_blocks.hpp"
#include "importers/shell_condition.hpp"

namespace capstan::importers {

namespace {

// Operators of arithmetic that assign if a `=` follows. In `<<=` and `>>=` the `=` is read by itself.
constexpr std::string_view kAssigning = "+-*/%&|^";

class Script : ShellBlocks {
 public:
  Script(std::string_view text, const std::map<std::string, std::string>& variables)
      : ShellBlocks(text, variables), script_(text) {}

  ShellScript read() {
    read_until(text_.size());
    return std::move(out_);
  }

 private:
  void read_until(size_t end) {
    while (at_ < end)
      if (!read_patterns()) read_command();
  }

  // Returns why some byte of a word is unknown.
  std::string unknown_reason_of(const ShellWord& word) const {
    if (std::string why = why_unread(word); !why.empty()) return why;
    for (const uint16_t mark : word.marks)
      if (mark > 0) return "depends on `" + out_.branches[mark - 1].text + "`, which is not decided";
    return {};
  }

  void assign(const std::string& name, bool append) {
    const size_t begin = at_;
    Words value;
    const bool list = peek() == '(';
    if (list) {
      const size_t opened = at_++;
      while (true) {
        skip_blanks();
        if (at_ >= text_.size()) unclosed('(', opened);
        if (text_[at_] == ')') break;
        if (ends_command(text_[at_])) {
          ++at_;
          continue;
        }
        for (ShellWord& word : read_word()) value.push_back(std::move(word));
      }
      ++at_;
    } else {
      // The right side of an assignment is not split into words.
      ShellWord joined;
      joined.begin = static_cast<uint32_t>(at_);
      bool first = true;
      for (ShellWord& word : read_word()) {
        if (!first) {
          joined.text += ' ';
          joined.offsets.push_back(word.begin);
          joined.marks.push_back(0);
        }
        first = false;
        append_to(joined, word);
      }
      add_names(joined.defaulted, vanished_);
      value.push_back(std::move(joined));
    }
    if (skipping()) return;
    if (!append) {
      change(name, std::move(value), begin);
      return;
    }
    keep_from_subshell(name);
    Words& variable = variables_[name];
    if (const size_t branch = undecided()) {
      out_.branches[branch - 1].assigns = true;
      mark(value, {}, branch);
    }
    if (!list && !variable.empty()) {
      append_to(variable[0], value[0]);
      grow(variable[0].text.size());
    } else {
      for (ShellWord& word : value) variable.push_back(std::move(word));
    }
  }

  // Processes a keyword at the beginning of a command; returns false if the word is no keyword.
  bool read_keyword(const std::string& text, size_t begin) {
    if (text == "if") {
      open_block(Block::Kind::branches, begin).condition = true;
    } else if (text == "then" && inside(Block::Kind::branches)) {
      begin_branch(blocks_.back(), blocks_.back().value);
    } else if (text == "elif" && inside(Block::Kind::branches)) {
      end_branch(blocks_.back());
      blocks_.back().condition = true;
      blocks_.back().condition_begin = at_;
    } else if (text == "else" && inside(Block::Kind::branches)) {
      begin_branch(blocks_.back(), Truth::yes);
    } else if ((text == "fi" && inside(Block::Kind::branches)) ||
               (text == "esac" && inside(Block::Kind::cases)) ||
               (text == "}" && inside(Block::Kind::group)) || (text == "done" && inside(Block::Kind::loop))) {
      close_block(begin);
    } else if (text == "{") {
      open_block(Block::Kind::group, begin);
    } else if (text == "case") {
      begin_case(begin);
    } else if (text == "for" || text == "while" || text == "until" || text == "select") {
      open_block(Block::Kind::loop, begin);
      if (text == "for" || text == "select") begin_loop();
    } else if (text == "do" && inside(Block::Kind::loop)) {
      Block& block = blocks_.back();
      block.undecided = report_branch(block.begin, written_since(block.begin), {});
      block.runs = Truth::unknown;
    } else {
      return text == "then" || text == "else" || text == "do" || text == "time";
    }
    return true;
  }

  // Reads `for NAME in …`. The variable's value is unknown, and the words are no command.
  void begin_loop() {
    skip_blanks();
    const size_t from = at_;
    while (name_rest(peek())) ++at_;
    if (!skipping()) forget(std::string(text_.substr(from, at_ - from)));
    while (at_ < text_.size() && !ends_command(text_[at_])) {
      read_word();
      skip_blanks();
    }
  }

  void begin_case(size_t begin) {
    skip_blanks();
    ShellCommand subject = read_word();
    for (ShellWord& word : subject)
      word.unknown_reason = word.unknown_reason.empty() ? unknown_reason_of(word) : word.unknown_reason;
    const std::vector<std::string> vanished = vanished_;
    skip_blanks();
    if (text_.substr(at_).starts_with("in")) at_ += 2;
    Block& block = open_block(Block::Kind::cases, begin);
    block.patterns = true;
    block.text = written_since(begin);
    note_variables(subject, block.variables);
    if (subject.size() == 1) block.subject = std::move(subject.front());
    if (subject.empty()) block.subject.defaulted = block.variables = vanished;
  }

  // Reads the patterns before a branch of `case`, up to the bracket; returns false if there are none.
  bool read_patterns() {
    if (blocks_.empty() || !blocks_.back().patterns) return false;
    while (at_ < text_.size() && (is_space_or_tab(text_[at_]) || text_[at_] == '\n')) ++at_;
    skip_blanks();
    // A comment may precede the line break.
    if (at_ < text_.size() && text_[at_] == '\n') return true;
    if (peek() == '(') ++at_;
    Truth found = Truth::no;
    while (at_ < text_.size()) {
      skip_blanks();
      const size_t before = at_;
      for (ShellWord& word : read_word()) {
        if (word.text == "esac" && peek() != ')') {
          close_block(before);
          return true;
        }
        word.unknown_reason = word.unknown_reason.empty() ? unknown_reason_of(word) : word.unknown_reason;
        found = either(found, matches(blocks_.back().subject, word));
      }
      skip_blanks();
      const char c = peek();
      if (c == '|' || c == ')') ++at_;
      if (c == ')' || at_ == before) break;
    }
    blocks_.back().patterns = false;
    begin_branch(blocks_.back(), found);
    return true;
  }

  // Processes the end of a command at `at_`, and moves past it.
  std::string_view end_of_command() {
    for (const std::string_view end : {";;&", ";;", ";&", "&&", "||", "|&"})
      if (text_.substr(at_).starts_with(end)) {
        at_ += end.size();
        return end;
      }
    return text_.substr(at_++, 1);
  }

  // After a command, decides whether the one that `&&`, `||` or `|` joins to it runs.
  void join_next(const ShellCommand& command, Truth status, std::string_view end, size_t begin) {
    begin = list_.pipeline.value_or(begin);
    list_.pipeline.reset();
    if (end == "|" || end == "|&") {
      list_.pipeline = begin;
      return;
    }
    list_.status = !list_.joined ? status
                   : list_.all   ? both(list_.status, status)
                                 : either(list_.status, status);
    if (status == Truth::unknown) {
      note_variables(command, list_.variables);
      if (!list_.unknown_begin) list_.unknown_begin = begin;
    }
    if (end != "&&" && end != "||") {
      if (!blocks_.empty()) {
        blocks_.back().value = list_.status;
        if (in_condition() && !blocks_.back().undecided) blocks_.back().variables = list_.variables;
      }
      list_ = {};
      return;
    }
    list_.joined = true;
    list_.all = end == "&&";
    const Truth runs = list_.all ? list_.status : negated(list_.status);
    if (runs == Truth::unknown && (status == Truth::unknown || !list_.branch) && !in_condition()) {
      // report_branch() must consider only the enclosing branches.
      list_.runs = Truth::yes;
      list_.branch = report_branch(*list_.unknown_begin,
                                   (list_.all ? "if " : "unless ") + written_since(*list_.unknown_begin),
                                   list_.variables);
    }
    list_.runs = in_condition() ? Truth::yes : runs;
  }

  // The offset after the operands of a `((…))` that begins here; 0: none begins here.
  size_t end_of_arithmetic() {
    if (!text_.substr(at_).starts_with("((")) return 0;
    const size_t opened = at_;
    at_ += 2;
    skip_nested('(', ')', opened);
    const size_t end = peek() == ')' ? at_ - 1 : 0;
    at_ = opened;
    return end;
  }

  // Reads `((…))` as a command of its operands and operators. Variables need no `$` there. The value of a
  // variable that it changes becomes unknown.
  ShellCommand read_arithmetic(size_t end) {
    Builder bracket;
    for (int i = 0; i < 2; ++i) put(bracket, '(', at_), ++at_;
    finish(bracket);
    ShellCommand command = std::move(bracket.finished);
    std::string name, sign;
    while (at_ < end) {
      Builder b;
      const size_t from = at_;
      const char c = text_[at_];
      if (is_space_or_tab(c) || c == '\n') {
        ++at_;
        continue;
      }
      bool changes = false;
      if (c == '$') {
        expand(b, true, 0);
      } else if (name_start(c)) {
        while (name_rest(peek())) ++at_;
        name = text_.substr(from, at_ - from);
        lookup(b, name, true, Items::first, from);
        changes = sign == "++" || sign == "--";
      } else if (name_rest(c)) {
        while (name_rest(peek())) put(b, text_[at_], at_), ++at_;
      } else {
        put(b, c, at_++);
        if (peek() == '=' || (peek() == c && c != '(' && c != ')')) put(b, peek(), at_), ++at_;
        sign = text_.substr(from, at_ - from);
        changes = sign == "=" || sign == "++" || sign == "--" ||
                  (sign.size() == 2 && sign[1] == '=' && kAssigning.find(c) != std::string_view::npos);
      }
      if (changes && !skipping()) forget(name);
      finish(b);
      for (ShellWord& word : b.finished) {
        word.unknown_reason = unknown_reason_of(word);
        command.push_back(std::move(word));
      }
    }
    at_ += 2;
    return command;
  }

  // Reads the head of a definition, `NAME ()` or `function NAME` with or without `()`, whose first word is
  // the command. Returns false if no function is defined.
  bool begin_function(const ShellCommand& command) {
    if (command.size() != 1) return false;
    std::string name = command[0].text;
    const bool keyword = name == "function";
    if (keyword) {
      skip_blanks();
      const Words words = read_word();
      if (words.size() != 1) return false;
      name = words[0].text;
    }
    skip_blanks();
    if (peek() == '(') {
      size_t close = at_ + 1;
      while (close < text_.size() && is_space_or_tab(text_[close])) ++close;
      if (close >= text_.size() || text_[close] != ')') return false;
      at_ = close + 1;
    } else if (!keyword) {
      return false;
    }
    defining_ = name;
    return true;
  }

  // Reads the body of a function where it is called, with the arguments in place of the script's.
  // Its status is then that of the block that has ended. Returns false if there is no such function.
  bool call(const ShellCommand& command) {
    if (command.empty() || active_.contains(command[0].text)) return false;
    const auto found = functions_.find(command[0].text);
    if (found == functions_.end()) return false;
    const auto [begin, end] = found->second;
    grow(end - begin + 1);
    active_.insert(command[0].text);
    std::map<std::string, SavedVariable> locals;
    std::map<std::string, SavedVariable>* const outer = std::exchange(locals_, &locals);
    for (size_t i = 1; i <= 9; ++i) {
      const std::string name = std::to_string(i);
      keep(name, locals);
      variables_[name] = i < command.size() ? Words{command[i]} : Words{};
    }
    const size_t after = std::exchange(at_, begin);
    const std::string_view text = std::exchange(text_, script_.substr(0, end));
    const size_t depth = blocks_.size();
    open_block(Block::Kind::group, begin);
    read_until(end);
    closed_ = {Truth::unknown, begin};
    while (blocks_.size() > depth) close_block(end);
    text_ = text;
    at_ = after;
    locals_ = outer;
    for (auto& [name, before] : locals) restore(name, std::move(before));
    active_.erase(command[0].text);
    return true;
  }

  void declare_local(const std::string& name) {
    if (!skipping()) keep(name, *locals_);
  }
  // Whether a word, or an option after it, declares variables of the function that is being read.
  bool is_local(const std::string& text, bool local) const {
    if (text.starts_with('-')) return local && text.find('g') == std::string::npos;
    return local || (locals_ && (text == "local" || text == "declare" || text == "typeset"));
  }

  // Notes a command that may set variables without an assignment. The values of those that it names become
  // unknown.
  void note_unread(const ShellCommand& command, size_t begin) {
    if (command.empty()) return;
    const std::string& name = command[0].text;
    const bool names = name == "read" || name == "mapfile" || name == "readarray" || name == "let";
    if (names || name == "source" || name == "." || name == "eval")
      out_.unread.push_back({static_cast<uint32_t>(begin), written_since(begin)});
    for (size_t i = 1; (names || name == "unset") && i < command.size(); ++i) {
      const std::string& text = command[i].text;
      const auto end = std::find_if_not(text.begin(), text.end(), name_rest);
      const std::string variable(text.begin(), end);
      // `unset -f` removes functions, and `unset A[1]` a part of a variable.
      if (!names && text == "-f") break;
      if (names || end != text.end())
        forget(variable);
      else
        change(variable, std::nullopt, command[i].begin);
    }
  }

  // Whether the word precedes assignments, as `export` and `env` do. Sets `declares` if it declares
  // variables: it is the command then, and names and assignments follow.
  static bool is_prefix(const std::string& text, bool& declares) {
    const bool declaration =
        text == "export" || text == "declare" || text == "local" || text == "readonly" || text == "typeset";
    declares = declares || declaration;
    return declaration || text == "env";
  }

  void read_command() {
    ShellCommand command;
    // Assignments may precede a command.
    bool assigning = true, assigned = false, declares = false, local = false;
    substituted_ = false;
    skip_blanks();
    size_t begin = at_;
    std::string_view end;
    while (true) {
      skip_blanks();
      if (at_ >= text_.size()) break;
      if (command.empty() && text_[at_] == '(') {
        if (const size_t last = end_of_arithmetic()) {
          command = read_arithmetic(last);
        } else {
          begin = at_++;
          open_block(Block::Kind::subshell, begin);
        }
        continue;
      }
      if (at_end_of_command()) {
        if (text_[at_] == '(' && begin_function(command)) return;
        end = end_of_command();
        if (end == "\n") skip_documents();
        break;
      }
      if (assigning) {
        if (const auto target = assignment()) {
          if (local) declare_local(target->first);
          assign(target->first, target->second);
          assigned = true;
          continue;
        }
      }
      const size_t word_begin = at_;
      Words words = read_word();
      if (words.empty() && !command.empty()) add_names(command.back().defaulted, vanished_);
      const bool literal = words.size() == 1 && words[0].text == text_.substr(word_begin, at_ - word_begin);
      if (command.empty() && literal && read_keyword(words[0].text, word_begin)) {
        skip_blanks();
        begin = closed_ ? closed_->begin : at_;
        if (!blocks_.empty() && blocks_.back().patterns) return;
        continue;
      }
      if (command.empty() && literal && words[0].text == "function" && begin_function(words)) return;
      for (ShellWord& word : words) {
        grow(word.text.size() + 1);
        if (command.empty() && (is_prefix(word.text, declares) || (declares && word.text.starts_with('-')))) {
          local = is_local(word.text, local);
          continue;
        }
        assigning = declares;
        if (local && !skipping()) {
          declare_local(word.text);
          change(word.text, std::nullopt, word_begin);
        }
        if (word.unknown_reason.empty()) word.unknown_reason = unknown_reason_of(word);
        // Sets `begin` to the word's offset in the variable's assignment, not to the offset of its use.
        if (!word.offsets.empty()) word.begin = word.offsets.front();
        command.push_back(std::move(word));
      }
    }
    const bool nothing = command.empty() && !assigned && !declares && !closed_;
    if (declares) command.clear();
    if (closed_) begin = closed_->begin;
    if (!nothing) finish_command(command, end, begin);
    if (end == ")" && inside(Block::Kind::subshell)) close_block(at_ - 1);
    if (end.starts_with(";;") || end == ";&") end_case_branch();
  }

  void finish_command(const ShellCommand& command, std::string_view end, size_t begin) {
    defining_.clear();
    const bool skipped = skipping();
    const size_t branch = undecided();
    Truth status = in_condition() ? truth_of(command) : success_of(command);
    if (closed_)
      status = closed_->status;
    else if (command.empty())
      status = substituted_ ? Truth::unknown : Truth::yes;
    closed_.reset();
    if (!command.empty() && !skipped && !is_test(command)) {
      out_.commands.push_back(command);
      out_.branch_of.push_back(branch);
    }
    if (!skipped) note_unread(command, begin);
    if (!skipped && call(command)) status = std::exchange(closed_, std::nullopt)->status;
    if (end == "&") status = in_condition() ? Truth::unknown : Truth::yes;
    join_next(command, status, end, begin);
  }

  void end_case_branch() {
    for (size_t i = blocks_.size(); i-- > 0;)
      if (blocks_[i].kind == Block::Kind::cases) {
        while (blocks_.size() > i + 1) close_block(at_);
        closed_.reset();
        list_ = {};
        blocks_.back().patterns = true;
        return;
      }
  }

  // The full script. While a function is read, `text_` ends with its body.
  std::string_view script_;
  // The functions that are being read.
  std::set<std::string> active_;
  // Variables that the function which is being read has declared; nullptr outside of functions.
  std::map<std::string, SavedVariable>* locals_ = nullptr;
};

}  // namespace

ShellScript read_shell(std::string_view text, const std::map<std::string, std::string>& variables) {
  return Script(text, variables).read();
}

}  // namespace capstan::importers
