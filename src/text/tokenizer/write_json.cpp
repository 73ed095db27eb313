#include "text/tokenizer/write_json.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::text {

namespace {

std::string added_tokens(const TokenizerText& text) {
  if (text.special_ids.empty()) return "  \"added_tokens\": [],\n";
  std::string out = "  \"added_tokens\": [\n";
  for (size_t i = 0; i < text.special_ids.size(); ++i) {
    const int32_t id = text.special_ids[i];
    const auto token = std::find_if(text.vocab.begin(), text.vocab.end(),
                                    [&](const auto& entry) { return entry.second == id; });
    out += "    {\n      \"id\": " + std::to_string(id) +
           ",\n      \"content\": " + capstan::quoted(token->first) +
           ",\n      \"single_word\": false,\n      \"lstrip\": false,\n      \"rstrip\": false,\n"
           "      \"normalized\": false,\n      \"special\": true\n    }";
    out += i + 1 < text.special_ids.size() ? ",\n" : "\n  ],\n";
  }
  return out;
}

std::string stages(const TokenizerText& text) {
  std::string out = text.pre_tokenizer == PreTokenizerChoice::qwen2
                        ? "  \"normalizer\": {\n    \"type\": \"NFC\"\n  },\n"
                        : "  \"normalizer\": null,\n";
  const std::string prefix = text.add_prefix_space ? "true" : "false";
  if (text.pre_tokenizer == PreTokenizerChoice::gpt2) {
    out += "  \"pre_tokenizer\": {\n    \"type\": \"ByteLevel\",\n    \"add_prefix_space\": " + prefix +
           ",\n    \"trim_offsets\": true,\n    \"use_regex\": true\n  },\n";
  } else {
    const auto pattern = text.pre_tokenizer == PreTokenizerChoice::llama3 ? kLlama3Pattern : kQwen2Pattern;
    out +=
        "  \"pre_tokenizer\": {\n    \"type\": \"Sequence\",\n    \"pretokenizers\": [\n      {\n        "
        "\"type\": \"Split\",\n"
        "        \"pattern\": {\n          \"Regex\": " +
        capstan::quoted(pattern) +
        "\n        },\n        \"behavior\": \"Isolated\",\n        \"invert\": false\n      },\n      {\n   "
        "     \"type\": \"ByteLevel\",\n"
        "        \"add_prefix_space\": " +
        prefix + ",\n        \"trim_offsets\": true,\n        \"use_regex\": false\n      }\n    ]\n  },\n";
  }
  return out +
         "  \"post_processor\": {\n    \"type\": \"ByteLevel\",\n    \"add_prefix_space\": true,\n    "
         "\"trim_offsets\": false,\n    \"use_regex\": true\n  },\n"
         "  \"decoder\": {\n    \"type\": \"ByteLevel\",\n    \"add_prefix_space\": true,\n    "
         "\"trim_offsets\": true,\n    \"use_regex\": true\n  },\n";
}

}  // namespace

PreTokenizerChoice pre_tokenizer_by_name(std::string_view name) {
  if (name == "gpt2") return PreTokenizerChoice::gpt2;
  if (name == "llama3") return PreTokenizerChoice::llama3;
  if (name == "qwen2") return PreTokenizerChoice::qwen2;
  fail(ErrorCode::usage, "there is no pre-tokenizer " + capstan::quoted(name), "one of gpt2, llama3, qwen2");
}

std::string tokenizer_json(TokenizerText text) {
  std::sort(text.special_ids.begin(), text.special_ids.end());
  std::string out = "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  out += added_tokens(text) + stages(text);
  out +=
      "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n    "
      "\"continuing_subword_prefix\": null,\n"
      "    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    "
      "\"ignore_merges\": ";
  out += text.ignore_merges ? "true,\n    \"vocab\": {\n" : "false,\n    \"vocab\": {\n";
  for (size_t i = 0; i < text.vocab.size(); ++i)
    out += "      " + capstan::quoted(text.vocab[i].first) + ": " + std::to_string(text.vocab[i].second) +
           (i + 1 < text.vocab.size() ? ",\n" : "\n    },\n");
  out += text.merges.empty() ? "    \"merges\": []\n" : "    \"merges\": [\n";
  for (size_t i = 0; i < text.merges.size(); ++i)
    out += "      [\n        " + capstan::quoted(text.merges[i].first) + ",\n        " +
           capstan::quoted(text.merges[i].second) +
           (i + 1 < text.merges.size() ? "\n      ],\n" : "\n      ]\n    ]\n");
  return out + "  }\n}";
}

}  // namespace capstan::text
