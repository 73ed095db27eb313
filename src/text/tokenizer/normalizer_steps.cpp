#include "text/tokenizer/normalizer_steps.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <functional>

#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/unicode_history.hpp"

namespace capstan::text {

namespace {

// A step that applies one change to each piece.
class ChangeStep : public TextStep {
 public:
  using Function = std::function<bool(std::string_view, const TextPiece&, Changes&)>;
  explicit ChangeStep(Function function) : function_(std::move(function)) {}
  void apply(TextPieces& pieces) const override { pieces.change(function_); }

 private:
  Function function_;
};

template <class F>
TextStepPtr change_step(F function) {
  return std::make_shared<ChangeStep>([function](std::string_view text, const TextPiece&, Changes& changes) {
    return function(text, changes);
  });
}

template <class Keep>
bool filter(std::string_view text, Changes& changes, Keep keep) {
  size_t removed = 0;
  bool any = false;
  for_each_character(text, [&](char32_t c, size_t) {
    if (keep(c)) {
      if (changes.list.empty())
        changes.removed_first = removed;
      else
        changes.list.back().change = -static_cast<int32_t>(removed);
      changes.add(c, 0);
      removed = 0;
    } else {
      any = true;
      ++removed;
    }
  });
  if (!changes.list.empty()) changes.list.back().change = -static_cast<int32_t>(removed);
  return any;
}

template <class Map>
bool map(std::string_view text, Changes& changes, Map mapped) {
  bool any = false;
  for_each_character(text, [&](char32_t c, size_t) {
    const char32_t to = mapped(c);
    any = any || to != c;
    changes.add(to, 0);
  });
  return any;
}

bool lowercase(std::string_view text, Changes& changes) {
  bool any = false;
  for_each_character(text, [&](char32_t c, size_t) {
    // The only capital letter whose lower-case form has two characters.
    if (c == 0x130) {
      any = true;
      changes.add('i', 0);
      changes.add(0x307, 1);
      return;
    }
    const char32_t to = small_letter(c);
    any = any || to != c;
    changes.add(to, 0);
  });
  return any;
}

bool is_chinese(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0x20000 && c <= 0x2A6DF) ||
         (c >= 0x2A700 && c <= 0x2B73F) || (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

bool strip(bool left, bool right, std::string_view text, Changes& changes) {
  std::vector<char32_t> characters;
  for_each_character(text, [&](char32_t c, size_t) { characters.push_back(c); });
  size_t first = 0, last = characters.size();
  if (left)
    while (first < characters.size() && is_space(characters[first])) ++first;
  size_t trailing = 0;
  if (right)
    while (trailing < characters.size() && is_space(characters[characters.size() - 1 - trailing])) ++trailing;
  if (first == 0 && trailing == 0) return false;
  last -= trailing;
  changes.removed_first = first;
  for (size_t i = first; i < last; ++i) changes.add(characters[i], 0);
  return true;
}

// Replaces `old_count` characters and records the changes as Hugging Face counts them.
void add_replacement(Changes& changes, size_t old_count, std::string_view text) {
  size_t count = 0;
  for_each_character(text, [&](char32_t c, size_t) {
    changes.add(c, 0);
    ++count;
  });
  if (count > old_count) {
    for (size_t i = 0; i < std::min(count - old_count, changes.list.size()); ++i)
      changes.list[changes.list.size() - 1 - i].change = 1;
  } else if (count < old_count && !changes.list.empty()) {
    changes.list.back().change -= static_cast<int32_t>(old_count - count);
  }
}

// Hugging Face tries each grapheme cluster of less than 6 bytes as one text, then each character; of several
// entries it takes the shortest.
bool apply_charsmap(const Charsmap& charsmap, std::string_view text, Changes& changes) {
  bool any = false;
  const auto cluster = [&](std::string_view grapheme, size_t characters) {
    if (grapheme.size() < 6)
      if (const auto match = charsmap.shortest(grapheme)) {
        any = true;
        add_replacement(changes, characters, match->text);
        return;
      }
    size_t at = 0;
    for_each_character(grapheme, [&](char32_t c, size_t bytes) {
      const auto match = charsmap.shortest(grapheme.substr(at, bytes));
      at += bytes;
      if (match) {
        any = true;
        add_replacement(changes, 1, match->text);
      } else {
        changes.add(c, 0);
      }
    });
  };
  size_t begin = 0, at = 0, characters = 0;
  utf8proc_int32_t previous = -1, state = 0;
  for_each_character(text, [&](char32_t c, size_t bytes) {
    const auto point = static_cast<utf8proc_int32_t>(c >= kRawByte ? 0xFFFD : c);
    if (previous >= 0 && utf8proc_grapheme_break_stateful(previous, point, &state)) {
      cluster(text.substr(begin, at - begin), characters);
      begin = at;
      characters = 0;
    }
    previous = point;
    at += bytes;
    ++characters;
  });
  if (at > begin) cluster(text.substr(begin), characters);
  return any;
}

class PrependStep : public TextStep {
 public:
  explicit PrependStep(std::string text) : text_(std::move(text)) {}
  void apply(TextPieces& pieces) const override {
    pieces.prepend(text_, [](std::string_view text, const TextPiece&) { return !text.empty(); });
  }

 private:
  std::string text_;
};

class ReplaceStep : public TextStep {
 public:
  ReplaceStep(std::shared_ptr<const Pattern> pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(TextPieces& pieces) const override {
    pieces.replace([this](std::string_view text,
                          FunctionRef<void(size_t, size_t)> match) { pattern_->find_all(text, match); },
                   content_);
  }

 private:
  std::shared_ptr<const Pattern> pattern_;
  std::string content_;
};

}  // namespace

TextStepPtr unicode_form_step(UnicodeForm form) {
  return change_step(
      [form](std::string_view text, Changes& changes) { return normal_form(form, text, changes); });
}

TextStepPtr lowercase_step() {
  return change_step(lowercase);
}

TextStepPtr strip_step(bool left, bool right) {
  return change_step(
      [left, right](std::string_view text, Changes& changes) { return strip(left, right, text, changes); });
}

TextStepPtr strip_accents_step() {
  return change_step([](std::string_view text, Changes& changes) {
    return filter(text, changes, [](char32_t c) { return !is_mark(c); });
  });
}

TextStepPtr prepend_step(std::string text) {
  return std::make_shared<PrependStep>(std::move(text));
}

TextStepPtr replace_step(std::shared_ptr<const Pattern> pattern, std::string content) {
  return std::make_shared<ReplaceStep>(std::move(pattern), std::move(content));
}

TextStepPtr charsmap_step(std::shared_ptr<const Charsmap> charsmap) {
  return change_step([charsmap](std::string_view text, Changes& changes) {
    return apply_charsmap(*charsmap, text, changes);
  });
}

TextStepPtr bert_normalizer_step(const BertNormalizerOptions& options) {
  TextSteps steps;
  if (options.clean_text) {
    steps.push_back(change_step([](std::string_view text, Changes& changes) {
      return filter(text, changes, [](char32_t c) { return c != 0 && c != 0xFFFD && !is_control(c); });
    }));
    steps.push_back(change_step([](std::string_view text, Changes& changes) {
      return map(text, changes, [](char32_t c) { return is_space(c) ? U' ' : c; });
    }));
  }
  if (options.chinese)
    steps.push_back(change_step([](std::string_view text, Changes& changes) {
      bool any = false;
      for_each_character(text, [&](char32_t c, size_t) {
        if (is_chinese(c)) {
          any = true;
          changes.add(' ', 0);
          changes.add(c, 1);
          changes.add(' ', 1);
        } else {
          changes.add(c, 0);
        }
      });
      return any;
    }));
  if (options.strip_accents) {
    steps.push_back(unicode_form_step(UnicodeForm::nfd));
    steps.push_back(change_step([](std::string_view text, Changes& changes) {
      return filter(text, changes, [](char32_t c) { return !is_nonspacing_mark(c); });
    }));
  }
  if (options.lowercase) steps.push_back(lowercase_step());
  return step_list(std::move(steps));
}

TextStepPtr nmt_step() {
  const auto dropped = [](char32_t c) {
    return (c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F;
  };
  const auto spaced = [](char32_t c) {
    return c == 9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 || (c >= 0x200B && c <= 0x200F) ||
           c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
  };
  TextSteps steps;
  steps.push_back(change_step([dropped](std::string_view text, Changes& changes) {
    return filter(text, changes, [&](char32_t c) { return !dropped(c); });
  }));
  steps.push_back(change_step([spaced](std::string_view text, Changes& changes) {
    return map(text, changes, [&](char32_t c) { return spaced(c) ? U' ' : c; });
  }));
  return step_list(std::move(steps));
}

TextStepPtr byte_alphabet_step() {
  return change_step([](std::string_view text, Changes& changes) {
    const auto& table = byte_to_character();
    size_t at = 0;
    for_each_character(text, [&](char32_t, size_t bytes) {
      for (size_t i = 0; i < bytes; ++i)
        changes.add(table[static_cast<unsigned char>(text[at + i])], i > 0 ? 1 : 0);
      at += bytes;
    });
    return true;
  });
}

}  // namespace capstan::text
