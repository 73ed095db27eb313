#include "importers/shell_words.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "importers/shell_condition.hpp"

namespace capstan::importers {

namespace {

// Limit of the bytes of all words together, with variables expanded.
constexpr size_t kMostExpanded = size_t{4} << 20;
// Limit of the nesting of expansions such as ${A:-${B:-…}}.
constexpr int kDeepest = 32;

bool name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool name_rest(char c) {
  return name_start(c) || (c >= '0' && c <= '9');
}
bool blank(char c) {
  return c == ' ' || c == '\t';
}
bool ends_command(char c) {
  return c == '\n' || c == ';' || c == '&' || c == '|' || c == '(' || c == ')';
}

using Words = std::vector<ShellWord>;

class Script {
 public:
  Script(std::string_view text, const std::map<std::string, std::string>& variables) : text_(text) {
    for (const auto& [name, value] : variables) {
      ShellWord word;
      word.text = value;
      word.at.assign(value.size(), 0);
      word.marks.assign(value.size(), 0);
      variables_[name] = {std::move(word)};
    }
  }

  ShellScript read() {
    while (at_ < text_.size())
      if (!read_patterns()) read_command();
    return std::move(out_);
  }

 private:
  [[noreturn]] void unclosed(char what, size_t opened) const {
    size_t line = 1;
    for (size_t i = 0; i < opened; ++i) line += text_[i] == '\n';
    fail(ErrorCode::format,
         std::string("`") + what + "` of line " + std::to_string(line) + " is never closed");
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  // Skips blanks, continued lines and comments.
  void skip_blanks() {
    while (at_ < text_.size()) {
      if (blank(text_[at_]))
        ++at_;
      else if (text_[at_] == '\\' && peek(1) == '\n')
        at_ += 2;
      else if (text_[at_] == '#')
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      else
        return;
    }
  }

  void grow(size_t bytes) {
    if ((expanded_ += bytes) > kMostExpanded)
      fail(ErrorCode::format, "the script's variables grow beyond " + std::to_string(kMostExpanded >> 20) +
                                  " MiB when they are filled in");
  }

  // A word that is being built. It is kept even if it is empty, if a part of it is `quoted`.
  struct Builder {
    Words done;
    ShellWord word;
    bool started = false;
  };
  static void put(Builder& b, char c, size_t offset, uint16_t mark = 0) {
    if (!b.started) b.word.begin = static_cast<uint32_t>(offset);
    b.started = true;
    b.word.text += c;
    b.word.at.push_back(static_cast<uint32_t>(offset));
    b.word.marks.push_back(mark);
  }
  static void start(Builder& b, size_t offset) {
    if (!b.started) b.word.begin = static_cast<uint32_t>(offset);
    b.started = true;
  }
  static void finish(Builder& b) {
    if (b.started) b.done.push_back(std::move(b.word));
    b.word = {};
    b.started = false;
  }

  static void add_names(std::vector<std::string>& names, const std::vector<std::string>& more) {
    for (const std::string& name : more)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }

  // Returns why some byte of a word is unknown. The lookup is by offset, so that other words of the same
  // variable do not count as unknown.
  std::string why_open(const ShellWord& word) const {
    for (const uint32_t offset : word.at) {
      auto range = open_.upper_bound(offset);
      if (range == open_.begin()) continue;
      --range;
      if (offset < range->second.first) return range->second.second;
    }
    for (const uint16_t mark : word.marks)
      if (mark > 0) return "depends on `" + out_.branches[mark - 1].text + "`, which is not decided";
    return {};
  }

  // An unknown variable stays as written.
  void put_open(Builder& b, size_t from, size_t to, std::string why) {
    start(b, from);
    for (size_t i = from; i < to; ++i) put(b, text_[i] == '\n' ? ' ' : text_[i], i);
    open_[static_cast<uint32_t>(from)] = {static_cast<uint32_t>(to), std::move(why)};
  }

  // Moves past the bracket that closes the one before `at_`, skipping quotes and brackets inside.
  void skip_nested(char open, char close, size_t opened) {
    int depth = 1;
    while (depth > 0) {
      if (at_ >= text_.size()) unclosed(open, opened);
      const char c = text_[at_++];
      if (c == '\\') {
        ++at_;
      } else if (c == '\'' || c == '"') {
        const size_t quote = at_ - 1;
        while (at_ < text_.size() && text_[at_] != c) at_ += text_[at_] == '\\' && c == '"' ? 2 : 1;
        if (at_ >= text_.size()) unclosed(c, quote);
        ++at_;
      } else if (c == open) {
        ++depth;
      } else if (c == close) {
        --depth;
      }
    }
  }

  void put_variable(Builder& b, const Words& value, bool quoted, bool as_list) {
    for (size_t i = 0; i < value.size(); ++i) {
      const ShellWord& part = value[i];
      grow(part.text.size() + 1);
      if (i > 0) {
        if (quoted && !as_list)
          put(b, ' ', part.begin);
        else
          finish(b);
      }
      add_names(b.word.defaulted, part.defaulted);
      if (quoted) start(b, part.begin);
      for (size_t k = 0; k < part.text.size(); ++k) {
        const char c = part.text[k];
        if (!quoted && (blank(c) || c == '\n')) {
          finish(b);
          add_names(b.word.defaulted, part.defaulted);
        } else {
          put(b, c, part.at[k], part.marks[k]);
        }
      }
    }
  }

  // Expands the variable at a `$` by the script's assignments.
  void expand(Builder& b, bool quoted, int depth) {
    const size_t dollar = at_++;
    const char c = peek();
    if (c == '(') {
      const bool arithmetic = peek(1) == '(';
      ++at_;
      skip_nested('(', ')', dollar);
      put_open(b, dollar, at_, arithmetic ? "arithmetic is not computed" : "commands are not executed");
      return;
    }
    if (c == '{') {
      expand_braces(b, quoted, dollar, depth);
      return;
    }
    if (name_start(c)) {
      const size_t from = at_;
      while (name_rest(peek())) ++at_;
      lookup(b, std::string(text_.substr(from, at_ - from)), quoted, Items::first, dollar);
      return;
    }
    if (c >= '0' && c <= '9' && variables_.contains(std::string(1, c))) {
      ++at_;
      lookup(b, std::string(1, c), quoted, Items::first, dollar);
      return;
    }
    if ((c >= '0' && c <= '9') || c == '@' || c == '*' || c == '#' || c == '?' || c == '$' || c == '!') {
      ++at_;
      put_open(b, dollar, at_, "it is an argument or a state of the shell");
      return;
    }
    put(b, '$', dollar);
  }

  // The forms $A, ${A[@]} and ${A[*]}.
  enum class Items : uint8_t { first, each, joined };

  void lookup(Builder& b, const std::string& name, bool quoted, Items items, size_t dollar) {
    const auto found = variables_.find(name);
    if (found == variables_.end())
      put_open(b, dollar, at_, "the script does not set `" + name + "`");
    else if (items == Items::first && found->second.size() > 1)
      put_variable(b, {found->second.front()}, quoted, false);
    else
      put_variable(b, found->second, quoted, items == Items::each);
  }

  void expand_braces(Builder& b, bool quoted, size_t dollar, int depth) {
    const size_t inside = ++at_;
    size_t end = inside;
    while (end < text_.size() && name_rest(text_[end])) ++end;
    const std::string name(text_.substr(inside, end - inside));
    const auto rest = [&](std::string_view what) { return text_.substr(end).starts_with(what); };
    if (!name.empty() && (rest("}") || rest("[@]}") || rest("[*]}"))) {
      const bool list = text_[end] == '[';
      at_ = end + (list ? 4 : 1);
      lookup(b, name, quoted,
             !list                   ? Items::first
             : text_[end + 1] == '@' ? Items::each
                                     : Items::joined,
             dollar);
      return;
    }
    const bool colon = rest(":-") || rest(":=");
    if (!name.empty() && (colon || rest("-") || rest("=")) && depth < kDeepest) {
      at_ = end + (colon ? 2 : 1);
      const auto found = variables_.find(name);
      const bool use = found != variables_.end() &&
                       !(colon && (found->second.empty() || found->second.front().text.empty()));
      Builder other;
      read_until_brace(other, quoted, dollar, depth + 1);
      finish(other);
      if (found == variables_.end()) {
        defaults_.emplace(name, other.done.empty() ? std::string() : other.done.front().text);
        add_names(b.word.defaulted, {name});
        for (ShellWord& word : other.done) add_names(word.defaulted, {name});
      }
      put_variable(b, use ? found->second : other.done, quoted, false);
      return;
    }
    skip_nested('{', '}', dollar);
    put_open(b, dollar, at_, "this form of expansion is not read");
  }

  // Reads the default of ${NAME:-default}, up to its closing brace.
  void read_until_brace(Builder& b, bool quoted, size_t opened, int depth) {
    while (true) {
      if (at_ >= text_.size()) unclosed('{', opened);
      const char c = text_[at_];
      if (c == '}') {
        ++at_;
        return;
      }
      if (c == '"' || c == '\'') {
        if (!quoted && c == '\'') single_quotes(b);
        // Quotes inside quotes only group words.
        else
          ++at_;
      } else if (c == '\\' && at_ + 1 < text_.size()) {
        if (text_[at_ + 1] != '\n') put(b, text_[at_ + 1], at_ + 1);
        at_ += 2;
      } else if (c == '$') {
        expand(b, true, depth);
      } else if (c == '`') {
        backticks(b);
      } else {
        put(b, c, at_++);
      }
    }
  }

  void single_quotes(Builder& b) {
    const size_t quote = at_++;
    start(b, quote);
    while (at_ < text_.size() && text_[at_] != '\'') put(b, text_[at_], at_), ++at_;
    if (at_ >= text_.size()) unclosed('\'', quote);
    ++at_;
  }

  void double_quotes(Builder& b) {
    const size_t quote = at_++;
    start(b, quote);
    while (at_ < text_.size() && text_[at_] != '"') {
      const char c = text_[at_];
      if (c == '\\' && at_ + 1 < text_.size()) {
        const char next = text_[at_ + 1];
        if (next == '\n') {
          // a continued line
        } else {
          if (next != '"' && next != '\\' && next != '$' && next != '`') put(b, c, at_);
          put(b, next, at_ + 1);
        }
        at_ += 2;
      } else if (c == '$') {
        expand(b, true, 0);
      } else if (c == '`') {
        backticks(b);
      } else {
        put(b, c, at_++);
      }
    }
    if (at_ >= text_.size()) unclosed('"', quote);
    ++at_;
  }

  void backticks(Builder& b) {
    const size_t tick = at_++;
    while (at_ < text_.size() && text_[at_] != '`') ++at_;
    if (at_ >= text_.size()) unclosed('`', tick);
    ++at_;
    put_open(b, tick, at_, "commands are not executed");
  }

  // Expands a word of the script to one word, or to several if a variable holds several.
  Words read_word() {
    Builder b;
    while (at_ < text_.size() && !blank(text_[at_]) && !ends_command(text_[at_])) {
      const char c = text_[at_];
      if (c == '\\') {
        if (peek(1) == '\n') {
          at_ += 2;
        } else if (at_ + 1 < text_.size()) {
          put(b, text_[at_ + 1], at_ + 1);
          at_ += 2;
        } else {
          ++at_;
        }
      } else if (c == '\'') {
        single_quotes(b);
      } else if (c == '"') {
        double_quotes(b);
      } else if (c == '`') {
        backticks(b);
      } else if (c == '$') {
        expand(b, false, 0);
      } else if (c == '<' && peek(1) == '<' && peek(2) != '<') {
        here_document();
      } else if (c == '<' || c == '>') {
        put(b, c, at_++);
        // For example 2>&1.
        if (peek() == '&' || peek() == '(') ++at_;
      } else {
        put(b, c, at_++);
      }
    }
    vanished_.clear();
    if (!b.started) vanished_ = b.word.defaulted;
    finish(b);
    return std::move(b.done);
  }

  // Skips the text of a here document, <<WORD, up to a line that is WORD.
  void here_document() {
    at_ += 2;
    if (peek() == '-') ++at_;
    while (blank(peek())) ++at_;
    std::string end;
    while (at_ < text_.size() && !blank(text_[at_]) && !ends_command(text_[at_])) {
      if (text_[at_] != '\'' && text_[at_] != '"' && text_[at_] != '\\') end += text_[at_];
      ++at_;
    }
    if (!end.empty()) documents_.push_back(std::move(end));
  }
  void skip_documents() {
    for (const std::string& end : std::exchange(documents_, {})) {
      while (at_ < text_.size()) {
        const size_t stop = std::min(text_.find('\n', at_), text_.size());
        std::string_view line = text_.substr(at_, stop - at_);
        at_ = std::min(stop + 1, text_.size());
        while (line.starts_with('\t')) line.remove_prefix(1);
        if (line == end) break;
      }
    }
  }

  static void append_to(ShellWord& to, const ShellWord& more) {
    to.text += more.text;
    to.at.insert(to.at.end(), more.at.begin(), more.at.end());
    to.marks.insert(to.marks.end(), more.marks.begin(), more.marks.end());
    add_names(to.defaulted, more.defaulted);
  }

  // Reads the name of an assignment NAME= or NAME+=, and moves `at_` after the sign.
  std::optional<std::pair<std::string, bool>> assignment() {
    size_t end = at_;
    if (end >= text_.size() || !name_start(text_[end])) return std::nullopt;
    while (end < text_.size() && name_rest(text_[end])) ++end;
    const std::string name(text_.substr(at_, end - at_));
    const bool append = text_.substr(end).starts_with("+=");
    if (!append && !text_.substr(end).starts_with("=")) return std::nullopt;
    at_ = end + (append ? 2 : 1);
    return std::pair(name, append);
  }

  void assign(const std::string& name, bool append) {
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
    Words& variable = variables_[name];
    if (const size_t branch = undecided()) {
      out_.branches[branch - 1].assigns = true;
      mark(value, append ? Words{} : variable, static_cast<uint16_t>(std::min<size_t>(branch, UINT16_MAX)));
    }
    if (!append) {
      variable = std::move(value);
    } else if (!list && !variable.empty()) {
      append_to(variable[0], value[0]);
      grow(variable[0].text.size());
    } else {
      for (ShellWord& word : value) variable.push_back(std::move(word));
    }
  }

  // Returns the text that an undecided branch appends. If the new value begins with the old one (A="$A
  // --more"), the old one is not repeated.
  static void mark(Words& value, const Words& before, uint16_t branch) {
    size_t kept = 0;
    if (value.size() == 1 && before.size() == 1 && value[0].text.starts_with(before[0].text) &&
        std::equal(before[0].at.begin(), before[0].at.end(), value[0].at.begin()))
      kept = before[0].text.size();
    for (ShellWord& word : value) {
      for (size_t i = kept; i < word.marks.size(); ++i)
        if (word.marks[i] == 0) word.marks[i] = branch;
    }
  }

  // ---- branches and loops -----------------------------------------------------------------------

  struct Block {
    enum class Kind : uint8_t { branches, cases, loop } kind = Kind::branches;
    // Offset of its first word.
    size_t begin = 0;
    // Text of the condition, such as "case $SIZE in".
    std::string text;
    // Offset of the condition.
    size_t asked = 0;
    // Whether the words are between `if` and `then`.
    bool condition = false;
    // The next word is a pattern of `case`.
    bool patterns = false;
    // Value of the condition so far.
    Truth value = Truth::yes;
    // `first`: the next command is the condition's first. `all`: the operator before it is `&&`, not `||`.
    bool first = true, all = true;
    // Whether the branch that is being read runs.
    Truth runs = Truth::yes;
    // Whether one of the branches before it ran.
    Truth before = Truth::no;
    // The word that `case` compares.
    ShellWord subject;
    // Its index in out_.branches, from 1; 0: none.
    size_t undecided = 0;
    std::vector<std::string> variables;
  };

  bool skipping() const {
    return chain_ == Truth::no || std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
             return !block.condition && block.runs == Truth::no;
           });
  }
  // The outermost undecided branch; 0: none.
  size_t undecided() const {
    for (const Block& block : blocks_)
      if (!block.condition && block.runs == Truth::unknown) return block.undecided;
    return chain_ == Truth::unknown ? chain_branch_ : 0;
  }

  // The script's text from `begin` to the current offset, on one line.
  std::string written_since(size_t begin) const {
    std::string text;
    for (const char c : text_.substr(begin, std::min<size_t>(at_ - begin, 200)))
      if (const bool gap = blank(c) || c == '\n' || c == ';'; !gap || (!text.empty() && text.back() != ' '))
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
    const Truth runs = both(holds, negated(block.before));
    block.condition = false;
    // report_branch() must consider only the enclosing branches.
    block.runs = Truth::yes;
    if (runs == Truth::unknown && !block.undecided)
      block.undecided = report_branch(
          block.begin, block.text.empty() ? "if " + written_since(block.asked) : block.text, block.variables);
    block.runs = runs;
    block.before = either(block.before, runs);
  }

  // Processes a keyword at the beginning of a command; returns false if the word is no keyword.
  bool keyword(const std::string& text, size_t begin) {
    const auto inside = [&](Block::Kind kind) { return !blocks_.empty() && blocks_.back().kind == kind; };
    if (text == "if") {
      blocks_.push_back({.begin = begin, .text = {}, .asked = at_, .condition = true, .subject = {}});
    } else if (text == "then" && inside(Block::Kind::branches)) {
      begin_branch(blocks_.back(), blocks_.back().value);
    } else if (text == "elif" && inside(Block::Kind::branches)) {
      Block& block = blocks_.back();
      block.condition = block.first = block.all = true;
      block.asked = at_;
    } else if (text == "else" && inside(Block::Kind::branches)) {
      begin_branch(blocks_.back(), Truth::yes);
    } else if (text == "fi" && inside(Block::Kind::branches)) {
      blocks_.pop_back();
    } else if (text == "esac" && inside(Block::Kind::cases)) {
      blocks_.pop_back();
    } else if (text == "case") {
      begin_case(begin);
    } else if (text == "for" || text == "while" || text == "until" || text == "select") {
      blocks_.push_back({.kind = Block::Kind::loop, .begin = begin, .text = {}, .subject = {}});
      if (text == "for" || text == "select") begin_loop();
    } else if (text == "do" && inside(Block::Kind::loop)) {
      Block& block = blocks_.back();
      block.undecided = report_branch(block.begin, written_since(block.begin), {});
      block.runs = Truth::unknown;
    } else if (text == "done" && inside(Block::Kind::loop)) {
      blocks_.pop_back();
    } else {
      return text == "then" || text == "else" || text == "do" || text == "{" || text == "time";
    }
    return true;
  }

  // Reads `for NAME in …`. The variable's value is unknown, and the words are no command.
  void begin_loop() {
    skip_blanks();
    const size_t from = at_;
    while (name_rest(peek())) ++at_;
    if (!skipping()) variables_.erase(std::string(text_.substr(from, at_ - from)));
    while (at_ < text_.size() && !ends_command(text_[at_])) {
      read_word();
      skip_blanks();
    }
  }

  void begin_case(size_t begin) {
    skip_blanks();
    Block block{.kind = Block::Kind::cases, .begin = begin, .text = {}, .patterns = true, .subject = {}};
    ShellCommand subject = read_word();
    for (ShellWord& word : subject) word.open = word.open.empty() ? why_open(word) : word.open;
    note_variables(subject, block.variables);
    if (subject.size() == 1) block.subject = std::move(subject.front());
    if (subject.empty()) block.subject.defaulted = block.variables = vanished_;
    skip_blanks();
    if (text_.substr(at_).starts_with("in")) at_ += 2;
    block.text = written_since(begin);
    blocks_.push_back(std::move(block));
  }

  // Reads the patterns before a branch of `case`, up to the bracket; returns false if there are none.
  bool read_patterns() {
    if (blocks_.empty() || !blocks_.back().patterns) return false;
    while (at_ < text_.size() && (blank(text_[at_]) || text_[at_] == '\n')) ++at_;
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
          blocks_.pop_back();
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

  // After a command of a condition, combines its value by the operator that joins it to the next one.
  void add_to_condition(Block& block, const ShellCommand& command, std::string_view end) {
    if (!command.empty()) {
      Truth truth = truth_of(command);
      if (end == "|" || end == "&" || end == "(" || end == ")") truth = Truth::unknown;
      if (block.first) block.variables = block.undecided ? block.variables : std::vector<std::string>{};
      note_variables(command, block.variables);
      block.value = block.first ? truth : block.all ? both(block.value, truth) : either(block.value, truth);
      // The last list of commands determines the value.
      block.first = end != "&&" && end != "||";
    }
    block.all = end != "||";
  }

  // Processes the end of a command at `at_`, and moves past it.
  std::string_view end_of_command() {
    for (const std::string_view end : {";;&", ";;", ";&", "&&", "||"})
      if (text_.substr(at_).starts_with(end)) {
        at_ += end.size();
        return end;
      }
    return text_.substr(at_++, 1);
  }

  // After a command outside of conditions, decides whether the one that `&&` or `||` joins to it runs.
  void chain(const ShellCommand& command, std::string_view end, size_t begin) {
    const Truth before = chain_;
    chain_ = Truth::yes;
    if (end != "&&" && end != "||") return;
    // An assignment always succeeds.
    if (command.empty()) {
      chain_ = end == "&&" ? before : negated(before);
      return;
    }
    Truth truth = is_test(command) ? truth_of(command) : end == "&&" ? Truth::yes : Truth::unknown;
    if (end == "||") truth = negated(truth);
    truth = both(before, truth);
    if (truth == Truth::unknown) {
      std::vector<std::string> variables;
      note_variables(command, variables);
      chain_branch_ =
          report_branch(begin, (end == "&&" ? "if " : "unless ") + written_since(begin), variables);
    }
    chain_ = truth;
  }

  void read_command() {
    ShellCommand command;
    // Assignments may precede a command.
    bool assigning = true;
    bool declaring = false;
    skip_blanks();
    size_t begin = at_;
    std::string_view end;
    while (true) {
      skip_blanks();
      if (at_ >= text_.size()) break;
      if (ends_command(text_[at_])) {
        end = end_of_command();
        if (end == "\n") skip_documents();
        break;
      }
      if (assigning) {
        if (const auto target = assignment()) {
          assign(target->first, target->second);
          continue;
        }
      }
      const size_t word_begin = at_;
      Words words = read_word();
      if (words.empty() && !command.empty()) add_names(command.back().defaulted, vanished_);
      const bool literal = words.size() == 1 && words[0].text == text_.substr(word_begin, at_ - word_begin);
      if (command.empty() && literal && keyword(words[0].text, word_begin)) {
        begin = at_;
        if (!blocks_.empty() && blocks_.back().patterns) return;
        continue;
      }
      for (ShellWord& word : words) {
        grow(word.text.size() + 1);
        const std::string& text = word.text;
        if (command.empty() && (text == "declare" || text == "local" || text == "typeset")) declaring = true;
        // These words precede assignments or the command itself.
        const bool prefix = text == "export" || text == "declare" || text == "local" || text == "readonly" ||
                            text == "typeset" || text == "env";
        if (command.empty() && prefix) continue;
        if (command.empty() && declaring && text.starts_with('-')) continue;
        assigning = false;
        if (word.open.empty()) word.open = why_open(word);
        // Sets `begin` to the word's offset in the variable's assignment, not to the offset of its use.
        if (!word.at.empty()) word.begin = word.at.front();
        command.push_back(std::move(word));
      }
    }
    finish_command(std::move(command), end, begin);
  }

  void finish_command(ShellCommand command, std::string_view end, size_t begin) {
    if (!blocks_.empty() && blocks_.back().condition) {
      add_to_condition(blocks_.back(), command, end);
      return;
    }
    const bool skipped = skipping();
    const size_t branch = undecided();
    chain(command, end, begin);
    if (end.starts_with(";;") || end == ";&") {
      for (size_t i = blocks_.size(); i-- > 0;)
        if (blocks_[i].kind == Block::Kind::cases) {
          blocks_.resize(i + 1);
          blocks_.back().patterns = true;
          break;
        }
    }
    if (command.empty() || skipped) return;
    out_.commands.push_back(std::move(command));
    out_.branch_of.push_back(branch);
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t expanded_ = 0;
  std::map<std::string, Words> variables_;
  // Defaults in ${NAME:-default} of variables that come from outside.
  std::map<std::string, std::string> defaults_;
  // The field `defaulted` of a word that expanded to nothing.
  std::vector<std::string> vanished_;
  // Ranges of unknown text: begin → end and reason.
  std::map<uint32_t, std::pair<uint32_t, std::string>> open_;
  // End markers of the here documents that begin on the next line.
  std::vector<std::string> documents_;
  // The blocks that enclose the current command.
  std::vector<Block> blocks_;
  // Whether the current command runs, according to the `&&` and `||` before it.
  Truth chain_ = Truth::yes;
  size_t chain_branch_ = 0;
  ShellScript out_;
};

}  // namespace

ShellScript read_shell(std::string_view text, const std::map<std::string, std::string>& variables) {
  return Script(text, variables).read();
}

}  // namespace capstan::importers
