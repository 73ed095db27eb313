// Readers of strangers' bytes: a tokenizer.json or a SentencePiece .model (by its first byte), and text (`T`
// and bytes: encoded by every pre-tokenizer and decoded again).
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "named_error.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "text/tokenizer/train_bpe.hpp"

using namespace capstan;
using namespace capstan::text;

namespace {

const std::shared_ptr<const Tokenizer>* text_tokenizers() {
  static const std::shared_ptr<const Tokenizer>* const result = [] {
    auto* made = new std::shared_ptr<const Tokenizer>[4];
    const std::string_view text =
        "the then there 123 12 1 's 'll \n\n \r\n é éé 你好 你 \U0001F600 <|endoftext|> e\xCC\x81";
    ThreadPool pool(1);
    int i = 0;
    for (const auto choice :
         {PreTokenizerChoice::gpt2, PreTokenizerChoice::llama3, PreTokenizerChoice::qwen2}) {
      TrainOptions options;
      options.vocab_size = 300;
      options.min_frequency = 1;
      options.pre_tokenizer = choice;
      bool given = false;
      made[i++] = Tokenizer::from_json(train_bpe(
          [&](std::string& document) {
            document = text;
            return !std::exchange(given, true);
          },
          options, pool));
    }
    made[3] = byte_tokenizer();
    return made;
  }();
  return result;
}

void check_text(std::string_view text) {
  for (int i = 0; i < 4; ++i) {
    const Tokenizer& tokenizer = *text_tokenizers()[i];
    const auto ids = tokenizer.encode(text);
    if (i != 2 && tokenizer.decode_bytes(ids) != text) std::abort();  // the third one normalizes
    if (tokenizer.encode(text) != ids) std::abort();
    IncrementalDecoder decoder(text_tokenizers()[i]);
    std::string streamed;
    for (const int32_t id : ids) streamed += decoder.push(id);
    if (streamed + decoder.finish() != tokenizer.decode(ids)) std::abort();
    tokenizer.encode(text, {.specials_as_text = true});
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (!input.empty() && input[0] == 'T') {
    check_text(input.substr(1, 512));  // long enough for every way through; longer texts only take their time
    return 0;
  }
  fuzz::expect_no_internal_error([&] {
    const auto tokenizer = !input.empty() && input[0] == '\n'
                               ? Tokenizer::from_sentencepiece(std::string(input))
                               : Tokenizer::from_json(std::string(input));
    for (const std::string_view text :
         {std::string_view("a ab abb 12 <s>  e\xCC\x81 \xFF\n \xEF\xAC\x81 \xE2\x96\x81 <0x41>"),
          input.substr(0, 1000)}) {
      const auto ids = tokenizer->encode(text);
      for (const int32_t id : ids)
        if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
      const Encoding encoding = tokenizer->encode_with_offsets(text, {.add_special = true});
      for (const OffsetRange& place : encoding.offsets)
        if (place.begin > place.end || place.end > text.size()) std::abort();
      IncrementalDecoder decoder(tokenizer);
      std::string streamed;
      for (const int32_t id : ids) streamed += decoder.push(id);
      if (streamed + decoder.finish() != tokenizer->decode(ids)) std::abort();
    }
  });
  return 0;
}
