#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<TokenizerConfig>& s) {
  using T = TokenizerConfig;
  s.doc("tokenizer of the data, stored with every checkpoint; random tokens (dataset=mock) have none")
      .variants("tokenizer_type");
  s.field("tokenizer_type", &T::tokenizer_type).doc("type of tokenizer").effect(Effect::io).alias("type");
  s.field("tokenizer_model", &T::tokenizer_model)
      .doc("path of a tokenizer.json or of a SentencePiece .model file")
      .effect(Effect::io)
      .only_for({"huggingface", "sentencepiece"})
      .example("tokenizers/gpt2/tokenizer.json")
      .known_as("tokenizer_name")
      .known_as("tokenizer_name_or_path");
  s.field("vocab_file", &T::vocab_file).doc("path of vocab.json").effect(Effect::io).only_for({"gpt2_bpe"});
  s.field("merge_file", &T::merge_file).doc("path of merges.txt").effect(Effect::io).only_for({"gpt2_bpe"});
  s.field("pre_tokenizer", &T::pre_tokenizer)
      .doc("rule that splits text into words before BPE merges; a tokenizer.json defines its own")
      .effect(Effect::io)
      .only_for({"gpt2_bpe"});
  s.field("eod_token", &T::eod_token)
      .doc("token that ends a document")
      .only_for({"huggingface", "sentencepiece", "gpt2_bpe"});
  s.field("chat_template", &T::chat_template)
      .doc(
          "Jinja file or name of a built-in template that formats conversations; null: the template of the "
          "tokenizer")
      .only_for({"huggingface", "sentencepiece", "gpt2_bpe", "byte"})
      .example("chatml");
}

}  // namespace capstan::config
