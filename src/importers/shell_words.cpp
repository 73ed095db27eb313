#include "importers/shell_words.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "importers/shell_condition.hpp"
#include "importers/shell_reader.hpp"

namespace capstan::importers {

namespace {

// Limit of the nesting of blocks such as `if` and `{`.
constexpr size_t kDeepestBlock = 1000;
// Operators of arithmetic that assign if a `=` follows. In `<<=` and `>>=` the `=` is read by itself.
constexpr std::string_view kAssigning = "+-*/%&|^";

class Script : ShellReader {
 public:
  Script(std::string_view text, const std::map<std::string, std::string>& variables)
      : ShellReader(text, variables), script_(text) {}

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
  std::string why_open(const ShellWord& word) const {
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
          joined.at.push_back(word.begin);
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

  // Marks the text that an undecided branch writes or removes. If the new value begins with the old one
  // (A="$A --more"), only the rest is marked.
  static void mark(Words& value, const Words& before, size_t branch) {
    const auto marked = static_cast<uint16_t>(std::min<size_t>(branch, UINT16_MAX));
    size_t kept = 0;
    if (value.size() == 1 && before.size() == 1 && value[0].text.starts_with(before[0].text) &&
        std::equal(before[0].at.begin(), before[0].at.end(), value[0].at.begin()))
      kept = before[0].text.size();
    for (ShellWord& word : value) {
      for (size_t i = kept; i < word.marks.size(); ++i)
        if (word.marks[i] == 0) word.marks[i] = marked;
    }
  }

  // Whether the value expands to nothing that could be marked.
  static bool is_blank(const Words& value) {
    return std::all_of(value.begin(), value.end(),
                       [](const ShellWord& word) { return trim(word.text).empty(); });
  }

  // Sets a variable to a value, or unsets it if there is none. If an undecided branch empties or unsets it,
  // the branch leaves no text to mark: the text that it removes is marked instead, and is restored at the end
  // of the branch. `begin`: offset of the value.
  void change(const std::string& name, std::optional<Words> value, size_t begin) {
    const auto found = variables_.find(name);
    const bool known = found != variables_.end();
    const size_t branch = undecided();
    // A branch that unsets a variable which the script has never set leaves nothing to mark.
    if (!value && !known && branch) return;
    if (branch) {
      out_.branches[branch - 1].assigns = true;
      if (value) mark(*value, known ? found->second : Words{}, branch);
      Words before;
      if (known)
        before = std::move(found->second);
      else if (!unset_.contains(name))
        before = as_written(name, begin);
      mark(before, {}, branch);
      if (list_.runs == Truth::unknown) {
        if (!value || (is_blank(*value) && !is_blank(before))) value = std::move(before);
      } else if (Block* block = undecided_block()) {
        block->replaced.emplace(name, std::move(before));
      }
    }
    if (value) {
      variables_[name] = std::move(*value);
    } else {
      variables_.erase(name);
      unset_.insert(name);
    }
  }

  // The value of a variable that the script does not set outside of the branch.
  static Words as_written(const std::string& name, size_t begin) {
    Builder b;
    for (const char c : "$" + name) put(b, c, begin);
    finish(b);
    return std::move(b.done);
  }

  // The value of a variable becomes unknown.
  void forget(const std::string& name) {
    variables_.erase(name);
    unset_.erase(name);
    for (Block& block : blocks_) block.replaced.erase(name);
  }

  // ---- branches and loops -----------------------------------------------------------------------

  // Commands that `&&`, `||` and `|` join.
  struct List {
    // Whether its next command runs, and the undecided branch that says so; 0: none.
    Truth runs = Truth::yes;
    size_t branch = 0;
    // The exit status so far.
    Truth status = Truth::yes;
    // Whether an operator precedes the next command, and whether it is `&&`, not `||`.
    bool joined = false, all = true;
    // Offset of the pipeline that the next command continues.
    std::optional<size_t> pipeline;
    // Offset of the first command whose status is unknown, and the variables on which the status depends.
    std::optional<size_t> asked;
    std::vector<std::string> variables;
  };

  struct Block {
    enum class Kind : uint8_t { branches, cases, loop, group, subshell } kind = Kind::branches;
    // Offset of its first word.
    size_t begin = 0;
    // Text of the condition, such as "case $SIZE in".
    std::string text;
    // Offset of the condition, or of the commands of a group.
    size_t asked = 0;
    // Whether the words are between `if` and `then`.
    bool condition = false;
    // The next word is a pattern of `case`.
    bool patterns = false;
    // The exit status of the last list: of the condition, or of a group.
    Truth value = Truth::yes;
    // Whether the branch that is being read runs.
    Truth runs = Truth::yes;
    // Whether one of the branches before it ran.
    Truth before = Truth::no;
    // The word that `case` compares.
    ShellWord subject;
    // Its index in out_.branches, from 1; 0: none.
    size_t undecided = 0;
    std::vector<std::string> variables;
    // The name of the function whose body it is.
    std::string function;
    // The list that the block is a command of.
    List list;
    // The values, marked, of the variables that the branch that is being read changes.
    std::map<std::string, Words> replaced;
    // The number of branches that may run, and for each variable, the number of those that leave it empty.
    size_t branches = 0;
    std::map<std::string, size_t> emptied;
    // Whether one of the branches runs in any case.
    bool exhaustive = false;
  };

  bool inside(Block::Kind kind) const { return !blocks_.empty() && blocks_.back().kind == kind; }
  bool in_condition() const { return !blocks_.empty() && blocks_.back().condition; }

  Block& open_block(Block::Kind kind, size_t begin) {
    if (blocks_.size() == kDeepestBlock)
      fail(ErrorCode::format, "more than " + std::to_string(kDeepestBlock) + " nested blocks");
    Block& block = blocks_.emplace_back();
    block.kind = kind;
    block.begin = begin;
    block.asked = at_;
    block.list = std::exchange(list_, {});
    block.function = std::exchange(defining_, {});
    if (!block.function.empty()) block.runs = Truth::no;
    return block;
  }
  // `end`: offset behind the commands of the block.
  void close_block(size_t end) {
    end_branch(blocks_.back());
    const Block block = std::move(blocks_.back());
    blocks_.pop_back();
    const bool group = block.kind == Block::Kind::group || block.kind == Block::Kind::subshell;
    closed_ = {block.function.empty() ? group ? block.value : Truth::unknown : Truth::yes, block.begin};
    list_ = block.list;
    if (!block.function.empty() && !skipping()) functions_[block.function] = {block.asked, end};
    if (!block.exhaustive) return;
    for (const auto& [name, branches] : block.emptied)
      if (branches == block.branches) change(name, Words{}, block.begin);
  }
  // A variable that the branch leaves empty or unset gets the value back that it had before.
  void end_branch(Block& block) {
    for (auto& [name, before] : std::exchange(block.replaced, {})) {
      const auto found = variables_.find(name);
      const bool known = found != variables_.end();
      if (known && !is_blank(found->second)) continue;
      ++block.emptied[name];
      if (!known || !is_blank(before)) variables_[name] = std::move(before);
    }
  }

  bool skipping() const {
    return list_.runs == Truth::no || std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
             return block.list.runs == Truth::no || (!block.condition && block.runs == Truth::no);
           });
  }
  // The outermost undecided branch; 0: none.
  size_t undecided() const {
    for (const Block& block : blocks_) {
      if (block.list.runs == Truth::unknown) return block.list.branch;
      if (!block.condition && block.runs == Truth::unknown) return block.undecided;
    }
    return list_.runs == Truth::unknown ? list_.branch : 0;
  }

  // The innermost block that is undecided, itself or in the branch that is being read; nullptr: none.
  Block* undecided_block() {
    for (size_t i = blocks_.size(); i-- > 0;) {
      Block& block = blocks_[i];
      if (block.list.runs == Truth::unknown || (!block.condition && block.runs == Truth::unknown))
        return &block;
    }
    return nullptr;
  }

  // The script's text from `begin` to the current offset, on one line.
  std::string written_since(size_t begin) const {
    std::string text;
    for (const char c : text_.substr(begin, std::min<size_t>(at_ - begin, 200)))
      if (const bool gap = is_space_or_tab(c) || c == '\n' || c == ';';
          !gap || (!text.empty() && text.back() != ' '))
        text += gap ? ' ' : c;
    for (const std::string_view end : {"then", "do"})
      if (text.ends_with(" " + std::string(end))) text.resize(text.size() - end.size());
    while (text.ends_with(' ') || text.ends_with('&') || text.ends_with('|')) text.pop_back();
    return text;
  }

  size_t report_branch(size_t begin, std::string text, const std::vector<std::string>& variables) {
    // The branch is inside another one that is reported or skipped.
    if (skipping() || undecided()) return undecided();
    ShellBranch branch{static_cast<uint32_t>(begin), std::move(text), variables, {}, false};
    for (const std::string& name : variables)
      if (const auto found = defaults_.find(name); found != defaults_.end()) branch.defaults.insert(*found);
    out_.branches.push_back(std::move(branch));
    return out_.branches.size();
  }

  void note_variables(const ShellCommand& command, std::vector<std::string>& variables) const {
    for (const ShellWord& word : command) {
      add_names(variables, word.defaulted);
      for (size_t i = 0; i < word.marks.size(); ++i)
        if (const size_t mark = word.marks[i]; mark > 0 && (i == 0 || word.marks[i - 1] != mark))
          add_names(variables, out_.branches[mark - 1].variables);
      for (const std::string_view begin : {"the script does not set `", "it is an argument"}) {
        if (!word.open.starts_with(begin)) continue;
        std::string name;
        if (begin.ends_with('`'))
          name = word.open.substr(begin.size(), word.open.size() - begin.size() - 1);
        else if (const size_t dollar = word.text.find('$'); dollar + 1 < word.text.size())
          name = word.text.substr(dollar + 1, 1);
        if (!name.empty()) add_names(variables, {name});
      }
    }
  }

  void begin_branch(Block& block, Truth holds) {
    end_branch(block);
    const Truth runs = both(holds, negated(block.before));
    block.condition = false;
    // report_branch() must consider only the enclosing branches.
    block.runs = Truth::yes;
    if (runs == Truth::unknown && !block.undecided)
      block.undecided = report_branch(
          block.begin, block.text.empty() ? "if " + written_since(block.asked) : block.text, block.variables);
    block.runs = runs;
    block.before = either(block.before, runs);
    if (runs != Truth::no) ++block.branches;
    block.exhaustive = block.exhaustive || holds == Truth::yes;
  }

  // Processes a keyword at the beginning of a command; returns false if the word is no keyword.
  bool keyword(const std::string& text, size_t begin) {
    if (text == "if") {
      open_block(Block::Kind::branches, begin).condition = true;
    } else if (text == "then" && inside(Block::Kind::branches)) {
      begin_branch(blocks_.back(), blocks_.back().value);
    } else if (text == "elif" && inside(Block::Kind::branches)) {
      end_branch(blocks_.back());
      blocks_.back().condition = true;
      blocks_.back().asked = at_;
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
    for (ShellWord& word : subject) word.open = word.open.empty() ? why_open(word) : word.open;
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
        word.open = word.open.empty() ? why_open(word) : word.open;
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
      if (!list_.asked) list_.asked = begin;
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
      list_.branch = report_branch(
          *list_.asked, (list_.all ? "if " : "unless ") + written_since(*list_.asked), list_.variables);
    }
    list_.runs = in_condition() ? Truth::yes : runs;
  }

  // The offset behind the operands of a `((…))` that begins here; 0: none begins here.
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
    ShellCommand command = std::move(bracket.done);
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
      for (ShellWord& word : b.done) {
        word.open = why_open(word);
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
    std::map<std::string, Words> outside;
    for (size_t i = 1; i <= 9; ++i) {
      const std::string name = std::to_string(i);
      if (const auto had = variables_.find(name); had != variables_.end()) outside[name] = had->second;
      variables_[name] = i < command.size() ? Words{command[i]} : Words{};
    }
    const size_t behind = std::exchange(at_, begin);
    const std::string_view text = std::exchange(text_, script_.substr(0, end));
    const size_t depth = blocks_.size();
    open_block(Block::Kind::group, begin);
    read_until(end);
    closed_ = {Truth::unknown, begin};
    while (blocks_.size() > depth) close_block(end);
    text_ = text;
    at_ = behind;
    for (size_t i = 1; i <= 9; ++i) variables_.erase(std::to_string(i));
    variables_.merge(outside);
    active_.erase(command[0].text);
    return true;
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
    bool assigning = true, assigned = false, declares = false;
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
          assign(target->first, target->second);
          assigned = true;
          continue;
        }
      }
      const size_t word_begin = at_;
      Words words = read_word();
      if (words.empty() && !command.empty()) add_names(command.back().defaulted, vanished_);
      const bool literal = words.size() == 1 && words[0].text == text_.substr(word_begin, at_ - word_begin);
      if (command.empty() && literal && keyword(words[0].text, word_begin)) {
        skip_blanks();
        begin = closed_ ? closed_->begin : at_;
        if (!blocks_.empty() && blocks_.back().patterns) return;
        continue;
      }
      if (command.empty() && literal && words[0].text == "function" && begin_function(words)) return;
      for (ShellWord& word : words) {
        grow(word.text.size() + 1);
        if (command.empty() && (is_prefix(word.text, declares) || (declares && word.text.starts_with('-'))))
          continue;
        assigning = false;
        if (word.open.empty()) word.open = why_open(word);
        // Sets `begin` to the word's offset in the variable's assignment, not to the offset of its use.
        if (!word.at.empty()) word.begin = word.at.front();
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
  // The blocks that enclose the current command.
  std::vector<Block> blocks_;
  // The list that the current command is part of.
  List list_;
  // The exit status of the block that has just ended, and its offset.
  struct Closed {
    Truth status = Truth::yes;
    size_t begin = 0;
  };
  std::optional<Closed> closed_;
  // The function whose body begins next; empty: none.
  std::string defining_;
  // The offsets of the bodies of functions, and the functions that are being read.
  std::map<std::string, std::pair<size_t, size_t>> functions_;
  std::set<std::string> active_;
  ShellScript out_;
};

}  // namespace

ShellScript read_shell(std::string_view text, const std::map<std::string, std::string>& variables) {
  return Script(text, variables).read();
}

}  // namespace capstan::importers
