// The stages before the model: Unicode classes, scanners against regular expressions, NFC, tokens in the
// text.
#include <doctest/doctest.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/added_tokens.hpp"
#include "text/tokenizer/normalizer.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"
#include "text/tokenizer/unicode.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
using Kind = PreTokenizerStep::Kind;

TEST_CASE("unicode: the classes of Oniguruma in tokenizers 0.23") {
  // Counted over all code points with Split(Regex(…)) of Hugging Face tokenizers 0.23.3.
  int letters = 0, numbers = 0, marks = 0, spaces = 0;
  const UnicodeClasses& classes = unicode_classes();
  for (char32_t c = 0; c < 0x110000; ++c) {
    const uint8_t bits = classes.of(c);
    letters += (bits & kLetter) != 0;
    numbers += (bits & kNumber) != 0;
    marks += (bits & kMark) != 0;
    spaces += (bits & kSpace) != 0;
  }
  CHECK(letters == 141028);
  CHECK(numbers == 1911);
  CHECK(marks == 2501);
  CHECK(spaces == 25);
  for (const char32_t c : {U'\n', U'\r'}) CHECK(classes.of(c) == (kSpace | kNewline));
  for (const char32_t c : {char32_t{0x85}, char32_t{0x2028}, char32_t{0x3000}, char32_t{0xA0}})
    CHECK(classes.of(c) == kSpace);
  for (const char32_t c : {char32_t{0x180E}, char32_t{0x200B}, char32_t{0xFEFF}, char32_t{0x1C}})
    CHECK(classes.of(c) == 0);
  for (const char32_t c : {U'a', U'Z', U'7', U'_', U'é', char32_t{0x301}, char32_t{0x200D}, char32_t{0x24B6},
                           char32_t{0x2160}, char32_t{0x203F}})
    CHECK(is_word_character(c));
  for (const char32_t c :
       {U' ', U'-', U'!', char32_t{0xB2}, char32_t{0x2460}, char32_t{0x1F600}, char32_t{0xFFFD}})
    CHECK(!is_word_character(c));
}

static std::vector<std::string> pieces_of(const PreTokenizer& pre_tokenizer, std::string_view text) {
  std::vector<std::string> result;
  PreTokenizer::Scratch scratch;
  pre_tokenizer.run(text, scratch, [&](const PieceBatch& batch) {
    for (const auto piece : batch.pieces) {
      CHECK(piece.data() + piece.size() <= batch.readable_end);
      result.emplace_back(piece);
    }
  });
  return result;
}
static PreTokenizer one_step(Kind kind, std::shared_ptr<const Pattern> pattern = nullptr) {
  PreTokenizer result;
  result.steps.emplace_back();
  result.steps[0].kind = kind;
  result.steps[0].pattern = std::move(pattern);
  return result;
}

// Random text of characters that the patterns distinguish, and of others whose class is the same in
// Oniguruma's older Unicode.
class RandomText {
 public:
  explicit RandomText(uint64_t seed) : random_(philox_key(seed, purpose::test, 4)) {
    if (!agreed_.empty()) return;
    for (const auto& [bit, regex] : {std::pair{kLetter, "\\p{L}"}, {kNumber, "\\p{N}"}, {kSpace, "\\s"}}) {
      const auto pattern = Pattern::compile(regex);
      if (classes_.empty()) classes_.resize(0x110000);
      for (char32_t c = 0; c < 0x110000; ++c) {
        if (c >= 0xD800 && c < 0xE000) continue;
        std::string text;
        append_utf8(text, c);
        pattern->find_all(text, [&](size_t, size_t) { classes_[c] |= bit; });
      }
    }
    for (char32_t c = 0; c < 0x110000; ++c)
      if (!(c >= 0xD800 && c < 0xE000) &&
          classes_[c] == (unicode_classes().of(c) & (kLetter | kNumber | kSpace)))
        agreed_.push_back(c);
    CHECK(agreed_.size() > 1'100'000);
  }
  std::string next(bool broken_bytes) {
    static const std::u32string common =
        U"   \n\r\t''sStTmMdDrReEvVlLaZ09.!-<|>\u00a0\u2028\u3000éß١½你\u0301\u200d\u017f\u212a\U0001F600";
    std::string text;
    const uint64_t length = random_.below(24);
    for (uint64_t i = 0; i < length; ++i) {
      const uint64_t choice = random_.below(20);
      if (choice == 0)
        append_utf8(text, agreed_[random_.below(agreed_.size())]);
      else if (choice == 1 && broken_bytes)
        text += static_cast<char>(0x80 + random_.below(0x80));
      else
        append_utf8(text, common[random_.below(common.size())]);
    }
    return text;
  }

 private:
  PhiloxSequence random_;
  static inline std::vector<char32_t> agreed_;
  static inline std::vector<uint8_t> classes_;
};

TEST_CASE("pre-tokenizers: the scanners equal the regular expressions") {
  const std::pair<Kind, std::string_view> known[] = {
      {Kind::gpt2, kGpt2Pattern}, {Kind::llama3, kLlama3Pattern}, {Kind::qwen2, kQwen2Pattern}};
  for (const auto& [kind, regex] : known) {
    CAPTURE(regex);
    Kind found = Kind::unsplit;
    CHECK(known_pattern(regex, found));
    CHECK(found == kind);
    const PreTokenizer scanner = one_step(kind), general = one_step(Kind::pattern, Pattern::compile(regex));
    RandomText text(11);
    for (int round = 0; round < 60'000; ++round) {
      const std::string sample = text.next(false);
      const auto got = pieces_of(scanner, sample);
      if (got != pieces_of(general, sample)) {
        CAPTURE(sample);
        CHECK(got == pieces_of(general, sample));
        break;
      }
    }
    // For any bytes, the pieces concatenate to the text and none is empty.
    for (int round = 0; round < 5'000; ++round) {
      const std::string sample = text.next(true);
      std::string joined;
      for (const auto& piece : pieces_of(scanner, sample)) {
        CHECK(!piece.empty());
        joined += piece;
      }
      CHECK(joined == sample);
    }
  }
  // tiktoken's own spelling of cl100k is the same.
  const std::string_view cl100k =
      R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
  const PreTokenizer scanner = one_step(Kind::llama3),
                     general = one_step(Kind::pattern, Pattern::compile(cl100k));
  RandomText text(12);
  for (int round = 0; round < 30'000; ++round) {
    const std::string sample = text.next(false);
    CHECK(pieces_of(scanner, sample) == pieces_of(general, sample));
  }
}

TEST_CASE("pre-tokenizers: a piece longer than a batch, steps after steps, spaces before pieces") {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "word" + std::to_string(i) + ' ';
  PreTokenizer steps = one_step(Kind::single_digits);
  steps.steps.emplace_back().kind = Kind::gpt2;
  std::string joined;
  for (const auto& piece : pieces_of(steps, text)) joined += piece;
  CHECK(joined == text);
  steps.steps[1].add_prefix_space = true;
  CHECK(pieces_of(steps, "ab12 c") == std::vector<std::string>{" ab", " 1", " 2", " c"});
  CHECK(pieces_of(one_step(Kind::digit_groups), "ab12 c345") ==
        std::vector<std::string>{"ab", "12", " c", "345"});
  CHECK(pieces_of(steps, "").empty());
}

// patterns.json is made by tests/golden/make_tokenizer_patterns.py.
TEST_CASE("pre-tokenizers: regular expressions split as those of Hugging Face do") {
  const auto fixture = capstan::json_of(read_file(tokenizer_fixtures::path("patterns.json")));
  for (const auto& [regex, expected] : fixture["patterns"].items()) {
    CAPTURE(regex);
    const PreTokenizer step = one_step(Kind::pattern, Pattern::compile(regex));
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto text = fixture["texts"][i].get<std::string>();
      CAPTURE(text);
      std::string lengths;
      for (const auto& piece : pieces_of(step, text))
        lengths += (lengths.empty() ? "" : " ") + std::to_string(piece.size());
      CHECK(lengths == expected[i].get<std::string>());
    }
  }
}

TEST_CASE("pre-tokenizers: constructs of Oniguruma") {
  const auto split = [](const char* regex, std::string_view text) {
    std::string result;
    for (const auto& piece : pieces_of(one_step(Kind::pattern, Pattern::compile(regex)), text))
      result += (result.empty() ? "" : "|") + piece;
    return result;
  };
  CHECK(split("(?i)ss", "a\u00dfb SS") == "a|\u00df|b |SS");
  CHECK(split("(?i:[\u00df])", "xssx") == "x|ss|x");
  CHECK(split("(?i:[\\p{Lu}])", "aB") == "a|B");
  CHECK(split("[a[bc]]+", "xabcx") == "x|abc|x");
  CHECK(split("[a-z&&[^c-e]]+", "abcdefg") == "ab|cde|fg");
  CHECK(split("[[a-c][:punct:]]+", "xa$,x") == "x|a$,|x");
  CHECK(split("[^[:^punct:]$]+", "a$,x") == "a$|,|x");
  CHECK(split("[:punct:]+", "a$tup:") == "a$|tup:");
  CHECK(split("[]\\p{^Word}]+", "a]-b") == "a|]-|b");
  CHECK(split("(?<=a+)b", "aab") == "aa|b");
  CHECK(split("/(?~/)/", "a/b/c") == "a|/b/|c");
  CHECK(split("\\101", "xAx") == "x|A|x");
  CHECK(split("\\X", "e\u0301x") == "e\u0301|x");
}

TEST_CASE("pre-tokenizers: Unicode blocks and calls of groups are refused") {
  for (const char* regex :
       {"(?<x>a|\\(\\g<x>\\))", "\\g'1'", "\\p{InCyrillic}", "[\\P{In_Greek}]", "\\p{^in basic-latin}"}) {
    CAPTURE(regex);
    CHECK_THROWS_WITH_AS(Pattern::compile(regex), doctest::Contains("are not supported"), Error);
  }
  CHECK_NOTHROW(Pattern::compile("\\p{Inherited}"));
}

TEST_CASE("pre-tokenizers: patterns are bounded and say where they are wrong") {
  for (const std::string regex : {"a(b", "[ab", "a\\", "\\C", "\\xe9", "a{100001}", "[[:foo:]]", "\\p{"}) {
    CAPTURE(regex);
    CHECK_THROWS_WITH_AS(Pattern::compile(regex), doctest::Contains("does not compile"), Error);
  }
  CHECK_THROWS_AS(Pattern::compile(std::string(20'000, 'a')), Error);
  CHECK_THROWS_AS(Pattern::compile(std::string(1000, '(') + "a" + std::string(1000, ')')), Error);
  const auto evil = Pattern::compile("(a+)+$");
  CHECK_THROWS_WITH_AS(evil->find_all(std::string(64, 'a') + "b", [](size_t, size_t) {}),
                       doctest::Contains("gave up"), Error);
  // A long text that needs one backtracking step for each character.
  size_t matches = 0;
  Pattern::compile("\\s+(?!\\S)|\\s+")->find_all(std::string(2'000'000, ' ') + "x", [&](size_t, size_t) {
    ++matches;
  });
  CHECK(matches == 2);
  std::vector<std::pair<size_t, size_t>> found;
  const auto note = [&](size_t begin, size_t end) { found.emplace_back(begin, end); };
  Pattern::compile("x*")->find_all("axxb", note);
  CHECK(found == std::vector<std::pair<size_t, size_t>>{{0, 0}, {1, 3}, {4, 4}});
  found.clear();
  Pattern::literal("a.b*[c]")->find_all("axb a.b*[c] ", note);
  CHECK(found == std::vector<std::pair<size_t, size_t>>{{4, 11}});
  found.clear();
  Pattern::compile("[\\s]|\\S\\S")->find_all("\xE1\xA0\x8E\xC2\xA0", note);  // U+180E is no space
  CHECK(found == std::vector<std::pair<size_t, size_t>>{{3, 5}});
  // No match, look-behind or line begins or ends at a stray byte.
  for (const auto& [regex, expected] :
       {std::pair{"\\S+", "0-1 2-3 5-6 "}, {"^.", "0-1 "}, {".$", "2-3 5-6 "}, {"(?<=a).", ""}}) {
    std::string result;
    Pattern::compile(regex)->find_all(
        "a\xFF"
        "b\n\xFF"
        "c",
        [&](size_t begin, size_t end) { result += std::to_string(begin) + "-" + std::to_string(end) + " "; });
    CHECK(result == expected);
  }
}

TEST_CASE("normalizer: NFC equals utf8proc's") {
  Normalizer nfc;
  nfc.nfc = true;
  std::vector<char32_t> interesting;
  for (char32_t c = 0; c < 0x30000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
    if (property->combining_class != 0 || property->decomp_seqindex != UINT16_MAX ||
        (c >= 0x1100 && c < 0x1200))
      interesting.push_back(c);
  }
  const auto reference = [](const std::string& text) {
    utf8proc_uint8_t* out = nullptr;
    const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &out,
                                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    REQUIRE(size >= 0);
    const std::string result(reinterpret_cast<const char*>(out), static_cast<size_t>(size));
    std::free(out);
    return result;
  };
  PhiloxSequence random(philox_key(5, purpose::test, 5));
  std::string buffer;
  for (const char32_t c : interesting) {
    std::string text = "x";
    append_utf8(text, c);
    text += 'y';
    CHECK(nfc.apply(text, buffer) == reference(text));
  }
  for (int round = 0; round < 40'000; ++round) {
    std::string text;
    for (uint64_t i = random.below(10); i > 0; --i) {
      const uint64_t choice = random.below(6);
      append_utf8(text, choice < 3   ? interesting[random.below(interesting.size())]
                        : choice < 5 ? U"aeou Aq\u0301\u0323\u0307가각\u1161\u11a8か"[random.below(16)]
                                     : char32_t(0x20 + random.below(0x2000)));
    }
    CHECK(nfc.apply(text, buffer) == reference(text));
  }
  const std::string plain = "plain é 你好 привет";
  CHECK(nfc.apply(plain, buffer).data() == plain.data());
  // Many marks of descending class do not take quadratic time, and stray bytes are kept.
  std::string marks = "a";
  for (int i = 0; i < 300'000; ++i) append_utf8(marks, i % 2 ? 0x323 : 0x301);
  CHECK(nfc.apply(marks, buffer).size() > 500'000);
  CHECK(nfc.apply("e\xCC\x81\xFF\xCC\x81"
                  "e\xCC",
                  buffer) ==
        "\xC3\xA9\xFF\xCC\x81"
        "e\xCC");
}

TEST_CASE("added tokens: the leftmost, then the longest") {
  const auto split = [](std::vector<AddedToken> tokens, std::string_view text, bool as_text = false) {
    TokenFinder finder;
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i].id = static_cast<int32_t>(i);
      finder.add(tokens[i].content, static_cast<int32_t>(i));
    }
    std::string result;
    finder.split(text, tokens, as_text, [&](std::string_view part, int32_t id) {
      result +=
          id < 0 ? "(" + std::string(part) + ")" : "[" + std::to_string(id) + ":" + std::string(part) + "]";
    });
    return result;
  };
  const auto token = [](const char* content) {
    AddedToken result;
    result.content = content;
    return result;
  };
  CHECK(split({token("ab"), token("abc"), token("b")}, "xabcabb") == "(x)[1:abc][0:ab][2:b]");
  CHECK(split({token("ab"), token("abcd")}, "abcab") == "[0:ab](c)[0:ab]");
  CHECK(split({token("<a>")}, "") == "");
  CHECK(split({token("<a>")}, "<a") == "(<a)");
  CHECK(split({token("x"), token("yy")}, "yxyyx") == "(y)[0:x][1:yy][0:x]");
  AddedToken left = token("L"), right = token("R"), word = token("w"), special = token("S");
  left.lstrip = right.rstrip = word.single_word = special.special = true;
  CHECK(split({left, right}, "a  L  R  L b") == "(a)[0:  L](  )[1:R  ][0:L]( b)");
  CHECK(split({word}, "w ww w_ -w- éw w") == "[0:w]( ww w_ -)[0:w](- éw )[0:w]");
  CHECK(split({special, word}, "aS wS", true) == "(aS wS)");
  CHECK(split({special, word}, "aS w S", true) == "(aS )[1:w]( S)");

  // In a text that resembles a token at every byte, the automaton finds the same tokens as a simple search.
  PhiloxSequence random(philox_key(8, purpose::test, 6));
  for (int round = 0; round < 20; ++round) {
    std::vector<AddedToken> tokens;
    for (int i = 0; i < 12; ++i) {
      std::string content;
      for (uint64_t n = 1 + random.below(i < 6 ? 4 : 200); n > 0; --n) content += random.below(8) ? 'a' : 'b';
      tokens.push_back(token(content.c_str()));
    }
    std::sort(tokens.begin(), tokens.end(),
              [](const auto& a, const auto& b) { return a.content < b.content; });
    tokens.erase(std::unique(tokens.begin(), tokens.end(),
                             [](const auto& a, const auto& b) { return a.content == b.content; }),
                 tokens.end());
    std::string text;
    for (int i = 0; i < 3000; ++i) text += random.below(9) ? 'a' : 'b';
    std::string expected, plain;
    for (size_t at = 0; at < text.size();) {
      size_t best = tokens.size();
      for (size_t i = 0; i < tokens.size(); ++i)
        if (text.compare(at, tokens[i].content.size(), tokens[i].content) == 0 &&
            (best == tokens.size() || tokens[i].content.size() > tokens[best].content.size()))
          best = i;
      if (best == tokens.size()) {
        plain += text[at++];
        continue;
      }
      if (!plain.empty()) expected += "(" + plain + ")";
      plain.clear();
      expected += "[" + std::to_string(best) + ":" + tokens[best].content + "]";
      at += tokens[best].content.size();
    }
    if (!plain.empty()) expected += "(" + plain + ")";
    CHECK(split(tokens, text) == expected);
  }
  CHECK(split({token(std::string(1000, 'a').c_str())}, std::string(1, 'b') + std::string(999, 'a')).size() ==
        1002);
  CHECK(split({token((std::string(1000, 'a') + "b").c_str())}, std::string(1'000'000, 'a')).size() ==
        1'000'002);
}
