#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<TokenizerConfig>& s) {
  using T = TokenizerConfig;
  s.doc("the tokenizer of the data, kept with every checkpoint").variants("tokenizer_type");
  s.field("tokenizer_type", &T::tokenizer_type).doc("which tokenizer").effect(Effect::io).alias("type");
  s.field("tokenizer_model", &T::tokenizer_model)
      .doc("a tokenizer.json, or a SentencePiece .model")
      .effect(Effect::io)
      .only_for({"huggingface", "sentencepiece"})
      .example("tokenizers/gpt2/tokenizer.json")
      .known_as("tokenizer_name")
      .known_as("tokenizer_name_or_path");
  s.field("vocab_file", &T::vocab_file).doc("vocab.json").effect(Effect::io).only_for({"gpt2_bpe"});
  s.field("merge_file", &T::merge_file).doc("merges.txt").effect(Effect::io).only_for({"gpt2_bpe"});
  s.field("pre_tokenizer", &T::pre_tokenizer)
      .doc("how text is cut before merging; a tokenizer.json names its own")
      .effect(Effect::io)
      .only_for({"gpt2_bpe"});
  s.field("eod_token", &T::eod_token)
      .doc("the token that ends a document")
      .only_for({"huggingface", "sentencepiece", "gpt2_bpe"});
  s.field("chat_template", &T::chat_template)
      .doc(
          "how a conversation becomes text: a Jinja file, or the name of a known template; null: the "
          "tokenizer's own")
      .example("chatml");
}

}  // namespace capstan::config
