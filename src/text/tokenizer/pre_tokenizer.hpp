// Splits text into the pieces inside which byte pairs are merged.
//
// A tokenizer.json lists steps, each of which splits the pieces of the one before. The patterns that models
// use have hand-written scanners (scanners.hpp), which one linear pass without allocation serves; any other
// goes through Oniguruma.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "text/tokenizer/pattern.hpp"

namespace capstan::text {

enum class SplitBehavior : uint8_t { removed, isolated, merged_with_previous, merged_with_next, contiguous };

struct PreTokenizerStep {
  enum class Kind : uint8_t { unsplit, gpt2, llama3, qwen2, single_digits, digit_groups, pattern };
  Kind kind = Kind::unsplit;
  // Inserts a space before a piece that does not begin with one, before splitting it.
  bool add_prefix_space = false;
  // The following fields apply to Kind::pattern.
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;
  std::shared_ptr<const Pattern> pattern;
};

// A range of the text: a match, or the text between two matches.
struct SplitSegment {
  size_t begin, end;
  bool match;
};
// Merges the parts as Hugging Face's NormalizedString::split does.
void merge_segments(SplitBehavior behavior, std::vector<SplitSegment>& parts);
// Appends the pieces that the step splits the text into; the caller applies add_prefix_space.
void split_piece(const PreTokenizerStep& step, std::string_view text, std::vector<std::string_view>& out);

// A batch of pieces, in order. The bytes from each piece up to `readable_end` may be read.
struct PieceBatch {
  std::span<const std::string_view> pieces;
  const char* readable_end;
};

class PreTokenizer {
 public:
  static constexpr size_t kBatch = 256;
  static constexpr size_t kMaxSteps = 16;

  // The working memory of one thread.
  struct Scratch {
    std::array<std::string_view, kBatch> batch;
    size_t count = 0;
    const char* readable_end = nullptr;
    // For each step, the piece with a space before it.
    std::vector<std::string> prefixed;
    // The pieces that each step splits its input into.
    std::vector<std::vector<std::string_view>> pieces;
  };

  std::vector<PreTokenizerStep> steps;

  void run(std::string_view text, Scratch& scratch, FunctionRef<void(const PieceBatch&)> sink) const;

 private:
  void run_step(size_t index, std::string_view text, Scratch& scratch,
                FunctionRef<void(const PieceBatch&)> sink) const;
};

// Finds the scanner of a regular expression by comparing its text. Returns false if there is none, so that
// the expression needs a Pattern.
bool known_pattern(std::string_view regex, PreTokenizerStep::Kind& kind);
extern const std::string_view kGpt2Pattern, kLlama3Pattern, kQwen2Pattern, kO200kPattern;

}  // namespace capstan::text
