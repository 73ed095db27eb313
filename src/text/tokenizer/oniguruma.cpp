#include "text/tokenizer/oniguruma.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/unicode.hpp"

namespace capstan::data {

namespace {

// What stands between the brackets of a class. PCRE2's own \s, \w and [:names:] are other sets of characters.
constexpr const char* kSpaces =
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
// Its complement.
constexpr const char* kNoSpaces =
    "\\x00-\\x08\\x0e-\\x1f\\x21-\\x84\\x86-\\x9f\\xa1-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{"
    "202a}-"
    "\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";
constexpr const char* kHex = "0-9A-Fa-f";
// Alphabetic, marks, decimal digits, connector punctuation.
#define CAPSTAN_WORD                                                                                         \
  "\\p{L}\\p{M}\\p{Nl}\\p{Nd}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}" \
  "-\\x{1f189}"
constexpr const char* kWord = CAPSTAN_WORD;
// Outside of classes Oniguruma reads Latin-1 from another table, which has ² ³ ¹ ¼ ½ ¾, too.
constexpr const char* kWordAlone = CAPSTAN_WORD "\\xb2\\xb3\\xb9\\xbc-\\xbe";
#undef CAPSTAN_WORD

struct Set {
  std::string content;      // between brackets
  bool complement = false;  // of what the content has
  bool folds = true;        // other cases of its characters are in it as well
};

struct Named {
  std::string_view name;
  const char* content;
  bool complement = false;
  bool folds = true;
};
// [:alpha:] and \p{Alpha}; \p{Punct} and \p{Word} differ.
constexpr Named kNamed[] = {{"alpha", "\\p{Alphabetic}"},
                            {"alnum", "\\p{Alphabetic}\\p{Nd}"},
                            {"punct", "\\p{P}\\p{S}"},
                            {"space", kSpaces},
                            {"word", kWord},
                            {"upper", "\\p{Uppercase}", false, false},
                            {"lower", "\\p{Lowercase}", false, false},
                            {"graph", "\\p{Cc}\\p{Cn}\\p{Cs}\\x20\\xa0\\p{Z}", true},
                            {"print", "\\p{Cc}\\p{Cn}\\p{Cs}\\p{Zl}\\p{Zp}", true},
                            {"cntrl", "\\p{Cc}"},
                            {"digit", "\\p{Nd}"},
                            {"xdigit", kHex},
                            {"blank", "\\x09\\p{Zs}"},
                            {"ascii", "\\x00-\\x7f", false, false}};

struct Category {
  std::string_view name;  // in small letters, without spaces, _ and -
  const char* content;
  bool folds = true;
};
constexpr Category kCategories[] = {{"any", "\\x{0}-\\x{10ffff}"},
                                    {"assigned", "\\P{Cn}"},
                                    {"alphabetic", "\\p{Alphabetic}"},
                                    {"uppercase", "\\p{Uppercase}", false},
                                    {"lowercase", "\\p{Lowercase}", false},
                                    {"whitespace", kSpaces},
                                    {"emoji", "\\p{Emoji}", false},
                                    {"letter", "\\p{L}"},
                                    {"casedletter", "\\p{L&}", false},
                                    {"lc", "\\p{L&}", false},
                                    {"uppercaseletter", "\\p{Lu}", false},
                                    {"lowercaseletter", "\\p{Ll}", false},
                                    {"titlecaseletter", "\\p{Lt}", false},
                                    {"modifierletter", "\\p{Lm}", false},
                                    {"otherletter", "\\p{Lo}", false},
                                    {"mark", "\\p{M}", false},
                                    {"combiningmark", "\\p{M}", false},
                                    {"nonspacingmark", "\\p{Mn}", false},
                                    {"spacingmark", "\\p{Mc}"},
                                    {"enclosingmark", "\\p{Me}"},
                                    {"number", "\\p{N}"},
                                    {"decimalnumber", "\\p{Nd}"},
                                    {"letternumber", "\\p{Nl}"},
                                    {"othernumber", "\\p{No}"},
                                    {"punctuation", "\\p{P}"},
                                    {"punct", "\\p{P}"},
                                    {"connectorpunctuation", "\\p{Pc}"},
                                    {"dashpunctuation", "\\p{Pd}"},
                                    {"openpunctuation", "\\p{Ps}"},
                                    {"closepunctuation", "\\p{Pe}"},
                                    {"initialpunctuation", "\\p{Pi}"},
                                    {"finalpunctuation", "\\p{Pf}"},
                                    {"otherpunctuation", "\\p{Po}"},
                                    {"symbol", "\\p{S}"},
                                    {"mathsymbol", "\\p{Sm}"},
                                    {"currencysymbol", "\\p{Sc}"},
                                    {"modifiersymbol", "\\p{Sk}"},
                                    {"othersymbol", "\\p{So}"},
                                    {"separator", "\\p{Z}"},
                                    {"spaceseparator", "\\p{Zs}"},
                                    {"lineseparator", "\\p{Zl}"},
                                    {"paragraphseparator", "\\p{Zp}"},
                                    {"other", "\\p{C}"},
                                    {"control", "\\p{Cc}"},
                                    {"format", "\\p{Cf}"},
                                    {"unassigned", "\\p{Cn}"},
                                    {"privateuse", "\\p{Co}"},
                                    {"surrogate", "\\p{Cs}"}};
constexpr std::string_view kShortCategories =
    " c cc cf cn co cs l ll lm lo lt lu m mc me mn n nd nl no p pc pd pe pf pi po ps s sc sk sm so z zl zp "
    "zs ";
constexpr std::string_view kShortThatFold =
    " c cc cf cn co cs l mc me n nd nl no p pc pd pe pf pi po ps s sc sk sm so z zl zp zs ";

std::string hex(char32_t c) {
  std::array<char, 16> text;
  std::snprintf(text.data(), text.size(), "\\x{%x}", static_cast<unsigned>(c));
  return text.data();
}

// Whether a character, or two of them, may be one half of a fold of several characters: ß and ss, ﬁ and fi.
bool folds_to_many(char32_t c) {
  if (c < 0x80) return false;
  if ((c >= 0x300 && c < 0x370) || c == 0x2BC || c == 0x2BE || c == 0x3B9 || c == 0x399 || c == 0x1FBE ||
      (c >= 0x530 && c < 0x590))
    return true;
  std::array<utf8proc_int32_t, 8> folded;
  int last = 0;
  return utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), folded.data(), folded.size(),
                                 UTF8PROC_CASEFOLD, &last) > 1;
}
bool pair_folds(char32_t a, char32_t b) {
  const auto small = [](char32_t c) {
    return c == 0x17F ? U's' : c < 0x80 && c >= 'A' && c <= 'Z' ? c + 32 : c;
  };
  a = small(a), b = small(b);
  return (a == 's' && (b == 's' || b == 't')) || (a == 'f' && (b == 'f' || b == 'i' || b == 'l'));
}

class Translator {
 public:
  explicit Translator(std::string_view regex) : in_(regex) {}

  std::string run() {
    groups_.push_back({0, 0, false, false});
    while (at_ < in_.size()) step();
    close_options();
    return std::move(out_);
  }

 private:
  struct Group {
    size_t start;                // of its text in out_
    int options;                 // groups that were opened for (?i) inside of it
    bool insensitive, extended;  // as before it
  };

  [[noreturn]] void refuse(const std::string& what, size_t place) const {
    fail(ErrorCode::unsupported, "the regular expression " + quoted(in_) + " has " + what + " (at byte " +
                                     std::to_string(place) + "), which is not supported");
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  bool starts(std::string_view text) const { return in_.substr(at_).starts_with(text); }
  char32_t take_character() {
    const Character c = decode_character(in_.data() + at_, in_.data() + in_.size());
    at_ += c.bytes;
    return c.value;
  }

  void step() {
    if (skip_blank()) return;
    const size_t start = out_.size();
    const char c = peek();
    if (c == '|') {
      out_ += in_[at_++];
      previous_ = 0;
      return;
    }
    if (c == '(') return open();
    if (c == ')') {
      if (groups_.size() == 1) {
        out_ += in_[at_++];  // PCRE2 says that it is too many
        return;
      }
      close_options();
      const Group group = groups_.back();
      groups_.pop_back();
      insensitive_ = group.insensitive, extended_ = group.extended;
      out_ += in_[at_++];
      return quantify(group.start);
    }
    if (c == '[') {
      previous_ = 0;
      character_class();
    } else if (c == '\\') {
      escape();
    } else if (c == '.' || c == '^' || c == '$' || c == '*' || c == '+' || c == '?') {
      previous_ = 0;
      out_ += in_[at_++];
    } else {
      literal(take_character());
    }
    quantify(start);
  }

  void literal(char32_t c) {
    if (insensitive_ && (folds_to_many(c) || pair_folds(previous_, c)))
      refuse("text in (?i) that equals other text of another length, as `ss` and `ß` do", at_ - 1);
    previous_ = c;
    out_ += hex(c);
  }

  // Comments, and white space where (?x) says so.
  bool skip_blank() {
    if (starts("(?#")) {
      const size_t close = in_.find(')', at_);
      if (close == std::string_view::npos) refuse("an unfinished comment", at_);
      at_ = close + 1;
      return true;
    }
    if (!extended_) return false;
    if (peek() == '#') {
      while (at_ < in_.size() && in_[at_] != '\n') ++at_;
      return true;
    }
    if (peek() != ' ' && (peek() < 9 || peek() > 13)) return false;
    ++at_;
    return true;
  }

  void open() {
    const size_t start = out_.size(), place = at_;
    for (const std::string_view head : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"})
      if (starts(head)) {
        if (head != "(?:") previous_ = 0;
        out_ += head;
        at_ += head.size();
        groups_.push_back({start, 0, insensitive_, extended_});
        return;
      }
    if (starts("(*")) refuse("a group `(*`", place);
    if (starts("(?<") || starts("(?'")) {
      const size_t close = in_.find(in_[at_ + 2] == '<' ? '>' : '\'', at_ + 3);
      if (close == std::string_view::npos) refuse("a group without a name", place);
      out_ += in_.substr(at_, close + 1 - at_);
      at_ = close + 1;
      groups_.push_back({start, 0, insensitive_, extended_});
      return;
    }
    if (!starts("(?")) {
      out_ += in_[at_++];
      groups_.push_back({start, 0, insensitive_, extended_});
      return;
    }
    bool insensitive = insensitive_, extended = extended_, on = true;
    std::string dot;
    for (at_ += 2;; ++at_) {
      const char c = peek();
      if (c == '-')
        on = false;
      else if (c == 'i')
        insensitive = on;
      else if (c == 'x')
        extended = on;
      else if (c == 'm')
        dot = on ? "s" : "-s";  // Ruby's m: a dot is any character
      else if (c == ')' || c == ':')
        break;
      else
        refuse("a group of another kind than (?: (?= (?! (?<= (?<! (?> (?<name> and the options i, m, x",
               place);
    }
    out_ += "(?" + std::string(insensitive ? "i" : "");
    if (dot == "s") out_ += dot;
    if (!insensitive || dot == "-s")
      out_ += std::string("-") + (insensitive ? "" : "i") + (dot == "-s" ? "s" : "");
    out_ += ':';
    if (in_[at_++] == ':')
      groups_.push_back({start, 0, insensitive_, extended_});
    else
      ++groups_.back().options;  // to the end of the group around it, `|` and all
    insensitive_ = insensitive, extended_ = extended;
  }

  void close_options() {
    for (; groups_.back().options > 0; --groups_.back().options) out_ += ')';
  }

  // {n}, {n,}, {n,m} or {,m} at the place, for PCRE2.
  std::optional<std::string> interval() {
    size_t i = at_ + 1;
    const auto digits = [&] {
      const size_t begin = i;
      while (i < in_.size() && in_[i] >= '0' && in_[i] <= '9') ++i;
      return std::string(in_.substr(begin, i - begin));
    };
    const std::string low = digits();
    std::string high;
    const bool comma = i < in_.size() && in_[i] == ',';
    if (comma) {
      ++i;
      high = digits();
    }
    if (i >= in_.size() || in_[i] != '}' || (low.empty() && high.empty())) return std::nullopt;
    if (!low.empty() && !high.empty() &&
        (low.size() > 6 || high.size() > 6 || std::stoi(low) > std::stoi(high)))
      refuse("a `{n,m}` with n above m", at_);
    at_ = i + 1;
    fixed_ = !comma;
    return "{" + (low.empty() ? "0" : low) + (comma ? "," : "") + high + "}";
  }

  // The quantifiers behind what out_ has from `start` on: one after another, each of all that is before it.
  void quantify(size_t start) {
    for (bool again = false;; again = true) {
      while (skip_blank()) {
      }
      const char c = peek();
      std::string sign;
      if (c == '*' || c == '+' || c == '?') {
        sign = c;
        ++at_;
        if (peek() == '?' || peek() == '+') sign += in_[at_++];
      } else if (c == '{') {
        const auto found = interval();
        if (!found) return;
        sign = *found;
        // No interval is possessive, and {n} is never lazy: what follows repeats it once more.
        if (!fixed_ && peek() == '?') sign += in_[at_++];
      } else {
        return;
      }
      if (start == out_.size()) refuse("a quantifier of nothing", at_ - 1);
      if (again) {
        out_.insert(start, "(?:");
        out_ += ')';
      }
      out_ += sign;
      previous_ = 0;
    }
  }

  // ---- sets ----

  // \p{…} or \P{…}, at the p.
  Set property() {
    const size_t place = at_ - 1;
    bool complement = in_[at_++] == 'P';
    const size_t close = in_.find('}', at_);
    if (peek() != '{' || close == std::string_view::npos) refuse("a property without {}", place);
    ++at_;
    if (peek() == '^') {
      complement = !complement;
      ++at_;
    }
    std::string name, script;
    for (const char c : in_.substr(at_, close - at_)) {
      if (c == ' ' || c == '_' || c == '-') continue;
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
      if (!letter) refuse("a property of another form than \\p{Name}", place);
      name += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    }
    at_ = close + 1;
    const std::string word = " " + name + " ";
    if (kShortCategories.find(word) != std::string_view::npos) {
      name[0] = static_cast<char>(name[0] - 32);
      return {"\\p{" + name + "}", complement, kShortThatFold.find(word) != std::string_view::npos};
    }
    for (const Category& one : kCategories)
      if (one.name == name) return {one.content, complement, one.folds};
    for (const Named& one : kNamed)
      if (one.name == name) return {one.content, one.complement != complement, one.folds};
    return {"\\p{sc:" + name + "}", complement,
            false};  // not the scripts that a character is used in, PCRE2's default
  }

  // A set's escape at the place (the letter behind \); nothing: it is none.
  std::optional<Set> set_escape(bool in_class) {
    const char c = peek();
    if (c == 'p' || c == 'P') {
      Set set = property();
      if (set.content == kWord && !in_class) set.content = kWordAlone;
      return set;
    }
    const char* content = c == 's' || c == 'S'   ? kSpaces
                          : c == 'h' || c == 'H' ? kHex
                          : c == 'd' || c == 'D' ? "\\p{Nd}"
                          : c == 'w' || c == 'W' ? (in_class ? kWord : kWordAlone)
                                                 : nullptr;
    if (!content) return std::nullopt;
    ++at_;
    return Set{content, c < 'a'};
  }

  static int digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  }

  // A character's escape, at the letter behind \.
  std::optional<char32_t> character_escape() {
    const size_t place = at_ - 1;
    const char c = peek();
    constexpr std::string_view kNames = "tnrfvae", kCodes = "\t\n\r\f\v\a\x1b";
    if (const size_t i = kNames.find(c); c != '\0' && i != std::string_view::npos) {
      ++at_;
      return static_cast<unsigned char>(kCodes[i]);
    }
    if (c == 'x' || c == 'u') {
      ++at_;
      const bool braces = c == 'x' && peek() == '{';
      const size_t most = braces ? 8 : c == 'x' ? 2 : 4;
      if (braces) ++at_;
      uint64_t value = 0;
      size_t count = 0;
      for (; count < most && digit(peek()) >= 0; ++count)
        value = value * 16 + static_cast<uint64_t>(digit(in_[at_++]));
      if (count == 0 || (c == 'u' && count < 4) || (braces && peek() != '}') || value > 0x10FFFF)
        refuse("a number of a character of another form than \\x41, \\x{41} and \\u0041", place);
      if (braces) ++at_;
      if (c == 'x' && !braces && value > 0x7F) refuse("a byte of a character, \\x80 and above", place);
      return static_cast<char32_t>(value);
    }
    if (c == 'c' && (peek(1) | 32) >= 'a' && (peek(1) | 32) <= 'z') {
      at_ += 2;
      return static_cast<char32_t>(in_[at_ - 1] & 31);
    }
    const bool word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (word || c == '\0') return std::nullopt;
    return take_character();
  }

  void escape() {
    const size_t place = at_++;
    if (const auto set = set_escape(false)) {
      previous_ = 0;
      // Alone a property does not look at (?i).
      if (insensitive_) out_ += "(?-i:";
      out_ += (set->complement ? "[^" : "[") + set->content + "]";
      if (insensitive_) out_ += ')';
      return;
    }
    if (const auto c = character_escape()) return literal(*c);
    previous_ = 0;
    const char c = peek();
    const std::string word = std::string("[") + kWordAlone + "]";
    if (c == 'b' || c == 'B') {
      const std::string same = "(?<=" + word + ")(?" + (c == 'b' ? "!" : "=") + word + ")";
      const std::string other = "(?<!" + word + ")(?" + (c == 'b' ? "=" : "!") + word + ")";
      out_ += "(?:" + same + "|" + other + ")";
      ++at_;
      return;
    }
    if (c >= '1' && c <= '9' && !(peek(1) >= '0' && peek(1) <= '9')) {
      out_ += std::string("\\") + c;
      ++at_;
      return;
    }
    if (c == 'k' && peek(1) == '<') {
      const size_t close = in_.find('>', at_);
      if (close == std::string_view::npos) refuse("an unfinished name", place);
      out_ += "\\" + std::string(in_.substr(at_, close + 1 - at_));
      at_ = close + 1;
      return;
    }
    if (c == '\0' || std::string_view("AzZGRXKN").find(c) == std::string_view::npos)
      refuse("the escape " + quoted(in_.substr(place, 2)), place);
    out_ += c == 'N' ? "[^\\n]" : std::string("\\") + c;
    ++at_;
  }

  // [:name:] at the place.
  std::optional<Set> posix() {
    const size_t close = in_.find(":]", at_ + 2);
    if (!starts("[:") || close == std::string_view::npos) return std::nullopt;
    std::string_view name = in_.substr(at_ + 2, close - at_ - 2);
    const bool complement = name.starts_with("^");
    if (complement) name.remove_prefix(1);
    for (const Named& one : kNamed)
      if (one.name == name) {
        at_ = close + 2;
        return Set{one.content, one.complement != complement, one.folds};
      }
    return std::nullopt;
  }

  // A character of a class at the place, or a set that goes to one of the two lists.
  std::optional<char32_t> class_item(std::string& inside, std::vector<std::string>& complements) {
    const size_t place = at_;
    std::optional<Set> set;
    if (peek() == '[') {
      set = posix();
      if (!set) refuse("a character class inside a character class", place);
    } else if (peek() == '\\') {
      ++at_;
      set = set_escape(true);
      if (!set && peek() == 'b') {
        ++at_;
        return 8;
      }
      if (!set) {
        const auto c = character_escape();
        if (!c) refuse("the escape " + quoted(in_.substr(place, 2)) + " in a class", place);
        return c;
      }
    } else {
      if (starts("&&")) refuse("the class intersection `&&`", place);
      return take_character();
    }
    if (insensitive_ && (!set->folds || (set->complement && set->content == "\\p{L}")))
      refuse("a set in a class in (?i) that (?i) makes larger", place);
    if (set->content == "\\p{L}" && insensitive_) set->content += "\\x{345}";  // an iota
    if (!set->complement)
      inside += set->content;
    else if (set->content == kSpaces)
      inside += kNoSpaces;
    else if (set->content.size() < 7 && set->content.starts_with("\\p"))
      inside += "\\P" + set->content.substr(2);
    else
      complements.push_back(set->content);
    return std::nullopt;
  }

  void character_class() {
    const size_t place = at_++;
    const bool negated = peek() == '^';
    if (negated) ++at_;
    std::string inside;
    std::vector<std::string> complements;
    for (bool first = true; first || peek() != ']'; first = false) {
      if (at_ >= in_.size())
        fail(ErrorCode::format, "the regular expression " + quoted(in_) +
                                    " has an unfinished class (at byte " + std::to_string(place) + ")");
      const auto low = class_item(inside, complements);
      if (!low) continue;
      char32_t high = *low;
      if (peek() == '-' && peek(1) != ']' && at_ + 1 < in_.size()) {
        ++at_;
        const auto end = class_item(inside, complements);
        if (!end || *end < *low) refuse("a range of characters without an end, or backwards", place);
        high = *end;
      }
      if (insensitive_ && high >= 0x80)
        for (char32_t c = std::max<char32_t>(*low, 0x80); c <= std::min<char32_t>(high, 0xFFFF); ++c)
          if (folds_to_many(c))
            refuse("text in (?i) that equals other text of another length, as `ss` and `ß` do", place);
      inside += hex(*low);
      if (high > *low) inside += "-" + hex(high);
    }
    ++at_;
    if (complements.empty()) {
      out_ += (negated ? "[^" : "[") + inside + "]";
      return;
    }
    std::string any;
    if (!inside.empty()) any = "[" + inside + "]|";
    for (const std::string& content : complements) any += "[^" + content + "]|";
    any.pop_back();
    out_ += negated ? "(?:(?!" + any + ")(?s:.))" : "(?:" + any + ")";
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
  std::vector<Group> groups_;
  bool insensitive_ = false, extended_ = false, fixed_ = false;
  char32_t previous_ = 0;  // the literal before, for folds of several characters
};

}  // namespace

std::string pcre2_of_oniguruma(std::string_view regex) {
  return Translator(regex).run();
}

}  // namespace capstan::data
