// Reads the characters of a shell script as words: quotes, comments, here documents, and variables that are
// expanded by the script's own assignments.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "importers/shell_words.hpp"

namespace capstan::importers {

using Words = std::vector<ShellWord>;

class ShellReader {
 protected:
  // The bytes of a variable's name, and those that end a command.
  static bool name_start(char c);
  static bool name_rest(char c);
  static bool ends_command(char c);

  ShellReader(std::string_view text, const std::map<std::string, std::string>& variables);

  [[noreturn]] void unclosed(char what, size_t opened) const;
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  // Skips blanks, continued lines and comments.
  void skip_blanks();

  void grow(size_t bytes);

  // A word that is being built. It is kept even if it is empty, if a part of it is `quoted`.
  struct Builder {
    Words finished;
    ShellWord word;
    bool started = false;
  };
  static void put(Builder& b, char c, size_t offset, uint16_t mark = 0);
  static void start(Builder& b, size_t offset);
  static void finish(Builder& b);

  static void add_names(std::vector<std::string>& names, const std::vector<std::string>& more);

  // An unknown variable stays as written.
  void put_unknown(Builder& b, size_t from, size_t to, std::string why);

  // Moves past the bracket that closes the one before `at_`, skipping quotes and brackets inside.
  void skip_nested(char open, char close, size_t opened);

  void put_variable(Builder& b, const Words& value, bool quoted, bool as_list);

  // Expands the variable at a `$` by the script's assignments.
  void expand(Builder& b, bool quoted, int depth);

  // The forms $A, ${A[@]} and ${A[*]}.
  enum class Items : uint8_t { first, each, joined };

  void lookup(Builder& b, const std::string& name, bool quoted, Items items, size_t dollar);

  void expand_braces(Builder& b, bool quoted, size_t dollar, int depth);

  // Reads the default of ${NAME:-default}, up to its closing brace.
  void read_until_brace(Builder& b, bool quoted, size_t opened, int depth);

  void single_quotes(Builder& b);

  void double_quotes(Builder& b);

  void backticks(Builder& b);

  // Expands a word of the script to one word, or to several if a variable holds several.
  Words read_word();

  // Skips the text of a here document, <<WORD, up to a line that is WORD.
  void here_document();
  void skip_documents();

  static void append_to(ShellWord& to, const ShellWord& more);

  // Reads the name of an assignment NAME= or NAME+=, and moves `at_` after the sign.
  std::optional<std::pair<std::string, bool>> assignment();

  // Whether a command ends at the current offset. The `&` of a redirection `&>FILE` ends none.
  bool at_end_of_command() const;
  // Whether some byte of the word comes from a part that is not known, and why; empty: none.
  std::string why_unread(const ShellWord& word) const;

  std::string_view text_;
  size_t at_ = 0;
  std::map<std::string, Words> variables_;
  // Variables that the script has unset; those in `variables_` have a value again.
  std::set<std::string> unset_;
  // Defaults in ${NAME:-default} of variables that come from outside.
  std::map<std::string, std::string> defaults_;
  // The field `defaulted` of a word that expanded to nothing.
  std::vector<std::string> vanished_;
  // Whether an output of commands was met since this was last cleared.
  bool substituted_ = false;

 private:
  size_t expanded_ = 0;
  // Whether the last expansion was a list without items.
  bool no_items_ = false;
  // Ranges of unknown text: begin → end and reason.
  std::map<uint32_t, std::pair<uint32_t, std::string>> unknown_ranges_;
  // End markers of the here documents that begin on the next line.
  std::vector<std::string> documents_;
};

}  // namespace capstan::importers
