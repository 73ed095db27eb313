#include "text/tokenizer/split_steps.hpp"

#include <functional>

#include "text/tokenizer/unicode_history.hpp"

namespace capstan::text {

namespace {

class SplitStep : public TextStep {
 public:
  using Function = std::function<void(std::string_view, TextPieceList&)>;
  explicit SplitStep(Function function) : function_(std::move(function)) {}
  void apply(TextPieces& pieces) const override { pieces.split(function_); }

 private:
  Function function_;
};

// Each matching character is a match of its own.
template <class IsMatch>
TextStepPtr character_step(IsMatch is_match, SplitBehavior behavior) {
  return std::make_shared<SplitStep>([is_match, behavior](std::string_view text, TextPieceList& parts) {
    std::vector<SplitSegment> matches;
    size_t done = 0, at = 0;
    for_each_character(text, [&](char32_t c, size_t bytes) {
      if (is_match(c)) {
        if (done < at) matches.push_back({done, at, false});
        matches.push_back({at, at + bytes, true});
        done = at + bytes;
      }
      at += bytes;
    });
    if (done < at) matches.push_back({done, at, false});
    merge_segments(behavior, matches);
    for (const SplitSegment& part : matches) parts.push_back({part.begin, part.end, -1});
  });
}

class MetaspaceStep : public TextStep {
 public:
  MetaspaceStep(std::string replacement, PrependScheme scheme, bool split)
      : replacement_(std::move(replacement)), scheme_(scheme), split_(split) {}

  void apply(TextPieces& pieces) const override {
    pieces.replace(
        [](std::string_view text, FunctionRef<void(size_t, size_t)> match) {
          for (size_t at = text.find(' '); at != std::string_view::npos; at = text.find(' ', at + 1))
            match(at, at + 1);
        },
        replacement_);
    if (scheme_ != PrependScheme::never)
      pieces.prepend(replacement_, [&](std::string_view text, const TextPiece& piece) {
        return !text.starts_with(replacement_) &&
               (scheme_ == PrependScheme::always || pieces.origin(piece) == 0);
      });
    if (!split_) return;
    pieces.split([&](std::string_view text, TextPieceList& parts) {
      size_t begin = 0;
      for (size_t at = text.find(replacement_, 0); at != std::string_view::npos;
           at = text.find(replacement_, at + replacement_.size())) {
        if (at > begin) parts.push_back({begin, at, -1});
        begin = at;
      }
      parts.push_back({begin, text.size(), -1});
    });
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
  bool split_;
};

class ScannerStep : public TextStep {
 public:
  explicit ScannerStep(const PreTokenizerStep& step) : step_(step) {}
  void apply(TextPieces& pieces) const override {
    if (step_.add_prefix_space)
      pieces.prepend(" ", [](std::string_view text, const TextPiece&) { return text.front() != ' '; });
    std::vector<std::string_view> split_pieces;
    pieces.split([&](std::string_view text, TextPieceList& parts) {
      split_pieces.clear();
      split_piece(step_, text, split_pieces);
      for (const std::string_view part : split_pieces) {
        const auto begin = static_cast<size_t>(part.data() - text.data());
        parts.push_back({begin, begin + part.size(), -1});
      }
    });
  }

 private:
  PreTokenizerStep step_;
};

}  // namespace

TextStepPtr scanner_step(const PreTokenizerStep& step) {
  return std::make_shared<ScannerStep>(step);
}

TextStepPtr metaspace_step(std::string replacement, PrependScheme scheme, bool split) {
  return std::make_shared<MetaspaceStep>(std::move(replacement), scheme, split);
}

TextStepPtr whitespace_step() {
  return std::make_shared<SplitStep>([](std::string_view text, TextPieceList& parts) {
    enum class Kind : uint8_t { space, word, other };
    Kind before = Kind::space;
    size_t begin = 0, at = 0;
    const auto end_run = [&] {
      if (before != Kind::space && begin < at) parts.push_back({begin, at, -1});
      begin = at;
    };
    for_each_character(text, [&](char32_t c, size_t bytes) {
      const Kind kind = is_word_character(c) ? Kind::word : is_space(c) ? Kind::space : Kind::other;
      if (kind != before) end_run();
      before = kind;
      at += bytes;
    });
    end_run();
  });
}

TextStepPtr whitespace_split_step() {
  return character_step(is_space, SplitBehavior::removed);
}

TextStepPtr punctuation_step(SplitBehavior behavior) {
  return character_step(is_punctuation, behavior);
}

TextStepPtr delimiter_step(char32_t delimiter) {
  return character_step([delimiter](char32_t c) { return c == delimiter; }, SplitBehavior::removed);
}

TextStepPtr bert_pre_tokenizer_step() {
  return step_list({whitespace_split_step(), punctuation_step(SplitBehavior::isolated)});
}

}  // namespace capstan::text
