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
  enum class Kind : uint8_t { whole, gpt2, llama3, qwen2, single_digits, digit_runs, pattern };
  Kind kind = Kind::whole;
  // A space goes before a piece that does not begin with one, then it is split.
  bool add_prefix_space = false;
  SplitBehavior behavior = SplitBehavior::isolated;  // for Kind::pattern
  bool invert = false;                               // for Kind::pattern
  std::shared_ptr<const Pattern> pattern;            // for Kind::pattern
};

// Matches and the text between them, and what Hugging Face's NormalizedString::split makes of them.
struct SplitPart {
  size_t begin, end;
  bool match;
};
void merge_parts(SplitBehavior behavior, std::vector<SplitPart>& parts);
// Appends the pieces that the step splits the text into (add_prefix_space is not its business).
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
    std::vector<std::string> prefixed;               // per step: the piece with a space before it
    std::vector<std::vector<std::string_view>> cut;  // per step
  };

  std::vector<PreTokenizerStep> steps;

  void run(std::string_view text, Scratch& scratch, FunctionRef<void(const PieceBatch&)> sink) const;

 private:
  void run_step(size_t index, std::string_view text, Scratch& scratch,
                FunctionRef<void(const PieceBatch&)> sink) const;
};

// The regular expressions that have a scanner: `regex` is compared as text. False: it needs a Pattern.
bool known_pattern(std::string_view regex, PreTokenizerStep::Kind& kind);
extern const std::string_view kGpt2Pattern, kLlama3Pattern, kQwen2Pattern;

}  // namespace capstan::text
