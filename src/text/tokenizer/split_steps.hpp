// The pre-tokenizers of a tokenizer.json as steps over TextPieces. Each does what Hugging Face's of that name
// does.
#pragma once

#include <string>

#include "text/tokenizer/normalizer_steps.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::text {

enum class PrependScheme : uint8_t { always, first, never };

// The scanner or pattern of a byte-level tokenizer's step; add_prefix_space puts a space before a piece
// without one.
TextStepPtr scanner_step(const PreTokenizerStep& step);
// Spaces become `replacement` (one character), one is put before the text by the scheme; with `split` a
// piece begins at each.
TextStepPtr metaspace_step(std::string replacement, PrependScheme scheme, bool split);
// Splits into words and runs of other characters, without white space.
TextStepPtr whitespace_step();
// Splits at white space and removes it.
TextStepPtr whitespace_split_step();
TextStepPtr punctuation_step(SplitBehavior behavior);
// Splits at each delimiter and removes it.
TextStepPtr delimiter_step(char32_t delimiter);
TextStepPtr bert_pre_tokenizer_step();

}  // namespace capstan::text
