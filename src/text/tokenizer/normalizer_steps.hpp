// The normalizers of a tokenizer.json as steps over TextPieces. Each does what Hugging Face's of that name
// does, offsets included.
#pragma once

#include <memory>
#include <string>

#include "text/tokenizer/charsmap.hpp"
#include "text/tokenizer/pattern.hpp"
#include "text/tokenizer/text_pieces.hpp"
#include "text/tokenizer/unicode_forms.hpp"

namespace capstan::text {

struct BertNormalizerOptions {
  bool clean_text = true, chinese = true, strip_accents = true, lowercase = true;
};

TextStepPtr unicode_form_step(UnicodeForm form);
TextStepPtr lowercase_step();
TextStepPtr strip_step(bool left, bool right);
TextStepPtr strip_accents_step();
// Prepends `text` to each piece that is not empty.
TextStepPtr prepend_step(std::string text);
TextStepPtr replace_step(std::shared_ptr<const Pattern> pattern, std::string content);
TextStepPtr charsmap_step(std::shared_ptr<const Charsmap> map);
TextStepPtr bert_normalizer_step(const BertNormalizerOptions& options);
TextStepPtr nmt_step();
// Each byte becomes its character of byte_level.hpp.
TextStepPtr byte_alphabet_step();

}  // namespace capstan::text
