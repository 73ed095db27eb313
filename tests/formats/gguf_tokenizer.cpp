// Converts a tokenizer.json to the metadata of a GGUF file: llama.cpp tokenizes with it as the package
// tokenizers does with the file (make_gguf.py), or the conversion is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "formats/gguf_tokenizer.hpp"
#include "support/errors.hpp"
#include "support/paths.hpp"
#include "text/tokenizer/tokenizer.hpp"

using namespace capstan;
using namespace capstan::formats;
using nlohmann::json;
using test::holds;
namespace fs = std::filesystem;

namespace {

const fs::path kTests = fs::path(capstan::test::kSourceDirectory) / "tests";

GgufMetadata metadata_of(const json& tokenizer, const std::string& config = "", int64_t rows = 1000,
                         const std::string& generation = "") {
  GgufMetadata result;
  for (auto& [key, value] : gguf_tokenizer(capstan::dump_json(tokenizer), config, generation, "", rows))
    CHECK(result.emplace(key, std::move(value)).second);
  return result;
}

// The error's message; its code has to be one that a file can bring about.
std::string refusal(const json& tokenizer, const std::string& config = "") {
  try {
    metadata_of(tokenizer, config);
  } catch (const Error& error) {
    CHECK((error.code() == ErrorCode::format || error.code() == ErrorCode::unsupported));
    return error.message();
  }
  return "";
}

json file(const std::string& name) {
  return capstan::json_of(read_file(kTests / name));
}
json family(const std::string& name) {
  return file("text/tokenizer/families/" + name + ".json");
}
json with(json tokenizer, const std::string& pointer, const json& value) {
  tokenizer[json::json_pointer(pointer)] = value;
  return tokenizer;
}
// spm.json's tokenizer as one of its kinds.
json sentencepiece(const json& fixture, const std::string& kind) {
  json result = fixture["tokenizer"];
  for (const char* stage : {"normalizer", "pre_tokenizer"}) result[stage] = fixture["stages"][kind][stage];
  return result;
}

// llama.cpp's llm_tokenizer_spm: of all neighbors that make a token the one with the highest score, the
// leftmost of equal ones.
std::vector<int64_t> as_llama_cpp(const GgufMetadata& metadata, const std::string& text) {
  const auto& tokens = metadata.at("tokenizer.ggml.tokens").texts;
  const auto& scores = metadata.at("tokenizer.ggml.scores").reals;
  std::map<std::string, size_t> ids;
  for (size_t i = 0; i < tokens.size(); ++i) ids[tokens[i]] = i;
  std::string escaped;
  const std::string before =
      metadata.at("tokenizer.ggml.add_space_prefix").integer && !text.empty() ? " " : "";
  for (const char c : before + text) escaped += c == ' ' ? "\u2581" : std::string(1, c);
  std::vector<std::string> symbols;
  for (const char c : escaped) {
    if ((static_cast<unsigned char>(c) & 0xc0) == 0x80)
      symbols.back() += c;
    else
      symbols.emplace_back(1, c);
  }
  while (true) {
    size_t best = symbols.size();
    double score = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ids.find(symbols[i] + symbols[i + 1]);
      if (found == ids.end() || (best < symbols.size() && scores[found->second] <= score)) continue;
      best = i;
      score = scores[found->second];
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<int64_t>(best) + 1);
  }
  std::vector<int64_t> result;
  for (const std::string& symbol : symbols) {
    if (const auto found = ids.find(symbol); found != ids.end()) {
      result.push_back(static_cast<int64_t>(found->second));
      continue;
    }
    for (const char c : symbol) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned char>(c));
      result.push_back(static_cast<int64_t>(ids.at(name)));
    }
  }
  return result;
}

}  // namespace

TEST_CASE("a SentencePiece tokenizer gives llama.cpp's algorithm the ids of the file") {
  const json fixture = file("formats/gguf/spm.json");
  for (const auto& [name, stage] : fixture["stages"].items()) {
    CAPTURE(name);
    const GgufMetadata metadata = metadata_of(sentencepiece(fixture, name), "", 700);
    CHECK(metadata.at("tokenizer.ggml.model").text == "llama");
    const bool blank = name != "gemma" && name != "metaspace_never";
    CHECK((metadata.at("tokenizer.ggml.add_space_prefix").integer != 0) == blank);
    for (size_t i = 0; i < fixture["texts"].size(); ++i) {
      const auto text = fixture["texts"][i].get<std::string>();
      CAPTURE(text);
      // Metaspace inserts no space before an existing one; llama.cpp does (docs/formats.md).
      if (blank && name != "llama" && (text.starts_with(" ") || text.starts_with("\u2581"))) continue;
      CHECK(as_llama_cpp(metadata, text) == stage["ids"][i].get<std::vector<int64_t>>());
    }
  }
}

TEST_CASE("a token that is called Prepend puts no blank before the text") {
  const json fixture = file("formats/gguf/spm.json");
  const json odd = with(sentencepiece(fixture, "gemma"), "/model/vocab/Prepend", 700);
  CHECK(metadata_of(odd).at("tokenizer.ggml.add_space_prefix").integer == 0);
}

namespace {

// Changes one of the model's two messages of settings, which hold small fields and the pieces none of theirs:
// `number` 2 is trainer_spec, 3 normalizer_spec. The last value of a field counts.
std::string with_field(const std::string& model, int number, int field, int value) {
  std::string added;
  const auto varint = [&](uint64_t v) {
    for (; v >= 128; v >>= 7) added += static_cast<char>(v | 128);
    added += static_cast<char>(v);
  };
  std::string inner;
  std::swap(added, inner);
  varint(static_cast<uint64_t>(field) << 3);
  varint(static_cast<uint64_t>(value));
  std::swap(added, inner);
  varint(static_cast<uint64_t>(number) << 3 | 2);
  varint(inner.size());
  return model + added + inner;
}
// Adds a piece of this type.
std::string with_piece(const std::string& model, const std::string& text, int type) {
  std::string inner = "\n" + std::string(1, static_cast<char>(text.size())) + text + "\x18";
  inner += static_cast<char>(type);
  return model + "\n" + std::string(1, static_cast<char>(inner.size())) + inner;
}

using Files = std::vector<std::pair<std::string, std::string>>;
GgufMetadata metadata_of(const Files& files, int64_t rows) {
  GgufMetadata result;
  for (auto& [key, value] : gguf_sentencepiece(files, rows))
    CHECK(result.emplace(key, std::move(value)).second);
  return result;
}
std::string refusal_of_model(const std::string& model, const std::string& config = "", int64_t rows = 1000) {
  try {
    metadata_of(Files{{"tokenizer.model", model}, {"tokenizer_config.json", config}}, rows);
  } catch (const Error& error) {
    CHECK((error.code() == ErrorCode::format || error.code() == ErrorCode::unsupported));
    return error.message();
  }
  return "";
}

}  // namespace

TEST_CASE("a SentencePiece model gives llama.cpp's algorithm the ids of the file, and comes back") {
  const std::string model = read_file(kTests / "text/tokenizer/families/spm_bpe.model");
  const auto tokenizer = text::Tokenizer::from_sentencepiece(model);
  std::vector<std::string> texts = {" two  blanks ", "\n\ttabs\n", "\u2581 and \u2581\u2581",
                                    "\u00e9\u4e2d\U0001F642\x01"};
  const json fixture = file("formats/gguf/spm.json");
  for (const json& text : fixture["texts"]) texts.push_back(text);
  for (const int prefix : {1, 0}) {
    CAPTURE(prefix);
    const std::string bytes = with_field(model, 3, 3, prefix);  // add_dummy_prefix
    const auto source = text::Tokenizer::from_sentencepiece(bytes);
    const GgufMetadata metadata = metadata_of(Files{{"tokenizer.model", bytes}}, 705);
    CHECK(metadata.at("tokenizer.ggml.model").text == "llama");
    CHECK(metadata.at("tokenizer.ggml.add_space_prefix").integer == prefix);
    const auto back = text::Tokenizer::from_json(tokenizer_json_of(metadata, "m.gguf"));
    for (const std::string& text : texts) {
      CAPTURE(text);
      const auto ids = source->encode(text);
      CHECK(as_llama_cpp(metadata, text) == std::vector<int64_t>(ids.begin(), ids.end()));
      CHECK(back->encode(text) == ids);
      CHECK(back->decode(ids) == source->decode(ids));
    }
  }
  // The kinds by SentencePiece's numbers, which are llama.cpp's.
  const GgufMetadata metadata = metadata_of(Files{{"tokenizer.model", model}}, 703);
  const auto& tokens = metadata.at("tokenizer.ggml.tokens").texts;
  const auto& types = metadata.at("tokenizer.ggml.token_type").integers;
  const auto& scores = metadata.at("tokenizer.ggml.scores").reals;
  REQUIRE(tokens.size() == 703);
  REQUIRE(scores.size() == 703);
  const auto type = [&](const std::string& token) {
    return types[static_cast<size_t>(std::find(tokens.begin(), tokens.end(), token) - tokens.begin())];
  };
  CHECK(type("<unk>") == 2);
  CHECK(type("<s>") == 3);
  CHECK(type("<tool>") == 4);
  CHECK(type("<0x0A>") == 6);
  CHECK(type("e") == 1);
  CHECK(tokens[702] == "[PAD702]");
  CHECK(types[702] == 5);
  const auto id = [&](const GgufMetadata& of, const std::string& name) {
    const auto found = of.find("tokenizer.ggml." + name + "_token_id");
    return found == of.end() ? -1 : found->second.integer;
  };
  CHECK(id(metadata, "bos") == tokenizer->id_of("<s>"));
  CHECK(id(metadata, "eos") == tokenizer->id_of("</s>"));
  CHECK(id(metadata, "padding") == -1);
  CHECK(metadata.at("tokenizer.ggml.add_bos_token").integer == 0);
  CHECK(metadata.count("tokenizer.chat_template") == 0);

  // Files beside the model: a class that adds BOS, further tokens and end tokens, a template.
  const GgufMetadata more =
      metadata_of(Files{{"tokenizer.model", model},
                        {"tokenizer_config.json",
                         R"({"tokenizer_class": "LlamaTokenizer", "eos_token": "<|end|>", "pad_token": "</s>",
               "added_tokens_decoder": {"0": {"content": "<unk>", "special": true}, "700": {"content": "<|end|>", "special": true},
               "701": {"content": "<plain>", "special": false}}})"},
                        {"generation_config.json", R"({"eos_token_id": [700, 2]})"},
                        {"chat_template.jinja", "{% generation %}a{% endgeneration %}"}},
                  703);
  CHECK(more.at("tokenizer.ggml.add_bos_token").integer == 1);
  CHECK(id(more, "eos") == 700);
  CHECK(id(more, "eot") == 2);
  CHECK(id(more, "padding") == 2);
  const auto& kinds = more.at("tokenizer.ggml.token_type").integers;
  CHECK(kinds[0] == 2);
  CHECK(kinds[700] == 3);
  CHECK(kinds[701] == 4);
  CHECK(more.at("tokenizer.ggml.tokens").texts[701] == "<plain>");
  CHECK(more.at("tokenizer.chat_template").text == "{% if true %}a{% endif %}");
}

TEST_CASE("SentencePiece models that llama.cpp would compute otherwise are refused with the reason") {
  const auto model = [](const char* name) { return read_file(kTests / "text/tokenizer/families" / name); };
  const std::string bpe = model("spm_bpe.model");
  CHECK(refusal_of_model(bpe).empty());
  CHECK(holds(refusal_of_model(model("spm_unigram.model")), "Unigram"));
  CHECK(holds(refusal_of_model(model("spm_bpe_unknown.model")), "without bytes"));
  CHECK(holds(refusal_of_model(with_field(bpe, 3, 4, 1)), "remove_extra_whitespaces"));
  CHECK(holds(refusal_of_model(with_field(bpe, 3, 5, 0)), "escape_whitespaces"));
  CHECK(holds(refusal_of_model(with_field(bpe, 2, 24, 1)), "treat_whitespace_as_suffix"));
  CHECK(refusal_of_model(with_piece(bpe, "qqq", 5)).empty());  // of no two pieces
  CHECK(holds(refusal_of_model(with_piece(bpe, "ee", 5)), "unused piece"));
  CHECK(holds(refusal_of_model(with_piece(bpe, "\u2581\u2581x", 4)), "holds a blank"));
  CHECK(holds(refusal_of_model(bpe, "", 600), "of 600"));
  CHECK(!refusal_of_model("").empty());
  CHECK(!refusal_of_model(bpe.substr(0, bpe.size() / 2)).empty());
  for (const char* config : {"[]", "{", R"({"add_bos_token": 1})", R"({"added_tokens_decoder": {"x": {}}})",
                             R"({"added_tokens_decoder": {"700": {"content": "a", "special": 1}}})"})
    CHECK(!refusal_of_model(bpe, config).empty());
}

// Ids without a token are filled as llama.cpp's converter does.
TEST_CASE("ids without a token have an unused one in GGUF, and none when it is read") {
  json holes = capstan::json_of(text::byte_tokenizer()->files()[0].text);
  holes["pre_tokenizer"]["use_regex"] = true;
  holes["model"]["vocab"]["<x>"] = 300;
  json added = holes["added_tokens"][0];
  added["id"] = 300;
  added["content"] = "<x>";
  holes["added_tokens"].push_back(added);
  const GgufMetadata metadata = metadata_of(holes, "", 304);
  const auto& tokens = metadata.at("tokenizer.ggml.tokens").texts;
  const auto& types = metadata.at("tokenizer.ggml.token_type").integers;
  CHECK(tokens.size() == 304);
  for (const size_t id : {257, 299, 301, 303}) {
    CHECK(tokens[id] == "[PAD" + std::to_string(id) + "]");
    CHECK(types[id] == 5);  // llama.cpp's LLAMA_TOKEN_TYPE_UNUSED
  }
  CHECK(tokens[300] == "<x>");
  const auto back = text::Tokenizer::from_json(tokenizer_json_of(metadata, "t.gguf"));
  CHECK(back->vocab_size() == 301);
  CHECK(back->encode("a<x>b") == std::vector<int32_t>{'a', 300, 'b'});
  CHECK(back->token_of(299) == "");
}

TEST_CASE("a byte-level tokenizer comes back from GGUF with the same ids") {
  // This is OLMo 2's form.
  json olmo = with(family("llama3"), "/model/ignore_merges", false);
  json& split = olmo["pre_tokenizer"]["pretokenizers"][0];
  split["behavior"] = "Removed";
  split["invert"] = true;
  const std::string config = R"({"bos_token": "<|begin_of_text|>", "add_bos_token": true})";
  for (const auto& [tokenizer, pre] : {std::pair{family("llama3"), "llama-bpe"},
                                       {olmo, "dbrx"},
                                       {family("qwen2"), "qwen2"},
                                       {family("gpt_oss"), "gpt-4o"},
                                       {file("formats/families/smollm2/tokenizer.json"), "gpt-2"}}) {
    CAPTURE(pre);
    const GgufMetadata metadata = metadata_of(tokenizer, config);
    CHECK(metadata.at("tokenizer.ggml.pre").text == pre);
    const auto before = text::Tokenizer::from_json(capstan::dump_json(tokenizer)),
               after = text::Tokenizer::from_json(tokenizer_json_of(metadata, "file"));
    for (const std::string text :
         {"The cat's 12345 hats,  and\n\n DON'T\t... \u00e5ngstr\u00f6m \u4e2d\u6587 <|im_end|>x", " a", "",
          "<|endoftext|>\n<|begin_of_text|>", "internationalisation 3.14"}) {
      CAPTURE(text);
      CHECK(after->encode(text) == before->encode(text));
    }
  }
}

TEST_CASE(
    "whether a token stands before the text is said by tokenizer_config.json, else by the post-processor") {
  const auto adds = [](const json& tokenizer, const std::string& config) {
    return metadata_of(tokenizer, config).at("tokenizer.ggml.add_bos_token").integer != 0;
  };
  CHECK(adds(family("llama3"), ""));
  CHECK(!adds(family("llama3"), R"({"add_bos_token": false})"));
  CHECK(!adds(family("qwen2"), ""));
  CHECK(adds(family("qwen2"), R"({"add_bos_token": true})"));
}

TEST_CASE("tokenizers that llama.cpp would compute otherwise are refused with the reason") {
  const json fixture = file("formats/gguf/spm.json");
  const json spm = sentencepiece(fixture, "metaspace"), llama3 = family("llama3"), qwen2 = family("qwen2"),
             gpt2 = file("formats/families/smollm2/tokenizer.json");
  CHECK(refusal(spm).empty());
  CHECK(refusal(gpt2).empty());
  // SentencePiece's kind.
  CHECK(holds(refusal(with(spm, "/pre_tokenizer/split", true)), "Metaspace"));
  CHECK(holds(refusal(with(spm, "/pre_tokenizer/replacement", "_")), "Metaspace"));
  CHECK(holds(refusal(with(spm, "/pre_tokenizer", {{"type", "Whitespace"}})), "Whitespace"));
  CHECK(holds(refusal(with(spm, "/pre_tokenizer", nullptr)), "blanks that stay blanks"));
  CHECK(holds(refusal(with(spm, "/normalizer", {{"type", "Lowercase"}})), "Lowercase"));
  CHECK(holds(refusal(with(spm, "/normalizer",
                           {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "b"}})),
              "Replace"));
  json few = spm;
  for (size_t i = 0; i < few["model"]["merges"].size(); i += 8) few["model"]["merges"].erase(i);
  CHECK(holds(refusal(few), "llama.cpp takes them all"));
  // GPT-2's kind.
  CHECK(holds(refusal(family("roberta")), "ByteLevel"));  // add_prefix_space
  CHECK(holds(refusal(family("byte_level_lower")), "normalizer"));
  CHECK(holds(refusal(with(gpt2, "/pre_tokenizer/use_regex", false)), "no name for"));
  CHECK(holds(refusal(with(llama3, "/pre_tokenizer/pretokenizers/1/use_regex", true)), "two expressions"));
  CHECK(holds(refusal(with(llama3, "/pre_tokenizer/pretokenizers/0/behavior", "Removed")), "the Split"));
  CHECK(holds(refusal(with(llama3, "/pre_tokenizer/pretokenizers/0/invert", true)), "the Split"));
  CHECK(holds(refusal(with(llama3, "/pre_tokenizer/pretokenizers/0/pattern", {{"Regex", "\\w+"}})),
              "no name for"));
  CHECK(holds(refusal(with(qwen2, "/model/ignore_merges", true)), "ignore_merges"));
  json swapped = llama3;
  std::swap(swapped["pre_tokenizer"]["pretokenizers"][0], swapped["pre_tokenizer"]["pretokenizers"][1]);
  CHECK(holds(refusal(swapped), "the Split"));
  // Both.
  CHECK(holds(refusal(with(gpt2, "/model/type", "Unigram")), "Unigram"));
  CHECK(holds(refusal(with(gpt2, "/model/dropout", 0.1)), "at random"));
  CHECK(holds(refusal(with(gpt2, "/model/end_of_word_suffix", "</w>")), "end_of_word_suffix"));
  CHECK(holds(refusal(with(gpt2, "/model/vocab/zzz", 1000)), "has id 1000 of 1000"));
}

TEST_CASE("a tokenizer.json with values of other types is refused by name") {
  const json fixture = file("formats/gguf/spm.json");
  for (const json& tokenizer :
       {sentencepiece(fixture, "llama"), sentencepiece(fixture, "metaspace"), family("llama3")}) {
    for (const std::string pointer : {"",
                                      "/model",
                                      "/model/type",
                                      "/model/byte_fallback",
                                      "/model/ignore_merges",
                                      "/model/dropout",
                                      "/model/unk_token",
                                      "/model/end_of_word_suffix",
                                      "/model/vocab",
                                      "/model/vocab/zz",
                                      "/model/merges",
                                      "/model/merges/0",
                                      "/model/merges/0/1",
                                      "/added_tokens",
                                      "/added_tokens/0",
                                      "/added_tokens/0/id",
                                      "/added_tokens/0/content",
                                      "/added_tokens/0/special",
                                      "/normalizer",
                                      "/normalizer/normalizers",
                                      "/normalizer/normalizers/0",
                                      "/normalizer/normalizers/0/type",
                                      "/normalizer/normalizers/0/prepend",
                                      "/normalizer/normalizers/1/pattern",
                                      "/normalizer/normalizers/1/pattern/String",
                                      "/pre_tokenizer",
                                      "/pre_tokenizer/split",
                                      "/pre_tokenizer/prepend_scheme",
                                      "/pre_tokenizer/pretokenizers",
                                      "/pre_tokenizer/pretokenizers/0",
                                      "/pre_tokenizer/pretokenizers/0/type",
                                      "/pre_tokenizer/pretokenizers/0/behavior",
                                      "/pre_tokenizer/pretokenizers/0/pattern",
                                      "/pre_tokenizer/pretokenizers/0/pattern/Regex",
                                      "/pre_tokenizer/pretokenizers/1/add_prefix_space",
                                      "/pre_tokenizer/pretokenizers/1/use_regex"}) {
      CAPTURE(pointer);
      const json::json_pointer place(pointer);
      if (!tokenizer.contains(place) && pointer != "/model/vocab/zz") continue;
      for (const json& value :
           {json(1.5), json(-3), json("text"), json(true), json::array({1}), json{{"a", 1}}}) {
        CAPTURE(capstan::dump_json(value));
        if (pointer != "/model/vocab/zz" && value.type() == tokenizer[place].type()) continue;
        if (pointer == "/model/unk_token" && value.is_string()) continue;
        json changed = tokenizer;
        changed[place] = value;
        CHECK(!refusal(changed).empty());
      }
    }
  }
  CHECK(holds(refusal(family("llama3"), "[]"), "not a JSON object"));
  CHECK(holds(refusal(family("llama3"), R"({"add_bos_token": 1})"), "add_bos_token"));
}

TEST_CASE("a vocabulary of many tokens is read in the time of its size") {
  GgufMetadata metadata;
  metadata["tokenizer.ggml.model"] = gguf_text("gpt2");
  GgufValue tokens, merges;
  tokens.kind = merges.kind = GgufValue::Kind::texts;
  for (int i = 0; i < 200000; ++i) tokens.texts.push_back("token" + std::to_string(i));
  tokens.texts.push_back("token7");  // twice: the last counts
  metadata["tokenizer.ggml.tokens"] = tokens;
  metadata["tokenizer.ggml.merges"] = merges;
  const std::clock_t begin = std::clock();
  const std::string text = tokenizer_json_of(metadata, "file");
  // A linear search for each token would take 25 s.
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 8);
  const json made = capstan::json_of(text);
  CHECK(made["model"]["vocab"].size() == 200000);
  CHECK(made["model"]["vocab"]["token7"] == 200000);
  CHECK(made["model"]["vocab"]["token199999"] == 199999);
}

TEST_CASE("every token that ends a text is in the file, and comes back from it") {
  const json tokenizer = {
      {"model",
       {{"type", "BPE"},
        {"vocab", {{"a", 0}, {"<e>", 1}, {"<t>", 2}, {"<m>", 3}}},
        {"merges", json::array()}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}}};
  const std::string all = R"({"bos_token_id": 0, "eos_token_id": [2, 1, 3, 1, 2000, -1], "pad_token_id": 1})";
  GgufMetadata metadata = metadata_of(tokenizer, R"({"eos_token": "<e>"})", 10, all);
  const auto id = [&](const std::string& name) {
    return metadata.at("tokenizer.ggml." + name + "_token_id").integer;
  };
  CHECK(id("bos") == 0);
  CHECK(id("eos") == 1);
  CHECK(id("eot") == 2);
  CHECK(id("eom") == 3);
  CHECK(capstan::json_of(generation_config_of(metadata)) ==
        json{{"bos_token_id", 0}, {"eos_token_id", {1, 2, 3}}, {"pad_token_id", 1}});
  CHECK(capstan::json_of(tokenizer_config_of(metadata))["eos_token"] == "<e>");
  // Without names in tokenizer_config.json the first one is eos.
  metadata = metadata_of(tokenizer, "", 10, R"({"eos_token_id": 3})");
  CHECK(id("eos") == 3);
  CHECK(metadata.count("tokenizer.ggml.eot_token_id") == 0);
  CHECK(capstan::json_of(generation_config_of(metadata)) == json{{"eos_token_id", 3}, {"pad_token_id", 3}});
  CHECK(generation_config_of(metadata_of(tokenizer)).empty());
  for (const char* settings : {"[]", "{", R"({"eos_token_id": "x"})", R"({"eos_token_id": null})"})
    CHECK(metadata_of(tokenizer, "", 10, settings).count("tokenizer.ggml.eos_token_id") == 0);
}

TEST_CASE("a token before every text is put there by Transformers too") {
  const json tokenizer = {
      {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"<s>", 1}}}, {"merges", json::array()}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}}};
  const auto metadata = metadata_of(tokenizer, R"({"bos_token": "<s>", "add_bos_token": true})", 2);
  const json back = capstan::json_of(tokenizer_json_of(metadata, "m.gguf"));
  CHECK(back["post_processor"]["type"] == "TemplateProcessing");
  CHECK(back["post_processor"]["special_tokens"]["<s>"]["ids"] == json{1});
  const auto read = text::Tokenizer::from_json(capstan::dump_json(back));
  CHECK(read->encode("a", {.add_special = true}) == std::vector<int32_t>{1, 0});
  CHECK(capstan::json_of(tokenizer_json_of(metadata_of(tokenizer, "", 2), "m.gguf"))["post_processor"]
            .is_null());
}
