// Tests malformed tokenizer files, directories of files, and the conversion of text files.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <set>

#include "base/error.hpp"
#include "text/tokenizer/encode_file.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "text/tokenizer/train_bpe.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
namespace fixtures = tokenizer_fixtures;
namespace fs = std::filesystem;
using capstan::OrderedJson;

namespace {

struct Directory {
  fs::path path = fs::temp_directory_path() / ("capstan_tokenizer_" + std::to_string(::getpid()));
  Directory() { fs::create_directories(path); }
  ~Directory() { fs::remove_all(path); }
  fs::path write(const std::string& name, const std::string& content) const {
    std::ofstream(path / name, std::ios::binary) << content;
    return path / name;
  }
};

// A small complete tokenizer.json, which the tests damage.
OrderedJson good() {
  return capstan::ordered_json_of(R"({"version":"1.0","truncation":null,"padding":null,
    "added_tokens":[{"id":4,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
    "normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
    "post_processor":null,"decoder":{"type":"ByteLevel"},
    "model":{"type":"BPE","dropout":null,"unk_token":null,"vocab":{"a":0,"b":1,"ab":2,"abb":3},"merges":[["a","b"],["ab","b"]]}})");
}

std::string error_of(const std::string& text) {
  try {
    Tokenizer::from_json(text, "t.json");
  } catch (const Error& error) {
    CHECK((error.code() == ErrorCode::format || error.code() == ErrorCode::unsupported));
    return error.message();
  }
  return "";
}

}  // namespace

TEST_CASE("tokenizer.json: errors name the problem and its location") {
  CHECK(error_of(capstan::dump_json(good())) == "");
  CHECK(Tokenizer::from_json(capstan::dump_json(good()))->encode("abba<s>") == std::vector<int32_t>{3, 0, 4});

  struct Row {
    const char* pointer;
    // JSON; empty: the member is removed.
    const char* value;
    const char* says;
  };
  const Row rows[] = {
      {"/version", "\"2.0\"", "t.json: version: expected \"1.0\""},
      {"/version", "1", "t.json: version: expected a string, got an integer"},
      {"/model", "", "there is no `model`"},
      {"/model", "[]", "model: expected an object, got an array"},
      {"/model/type", "\"WordLevel\"", "t.json: model.type: the model \"WordLevel\" is not supported"},
      {"/model/type", "\"Unigram\"", "model.vocab: expected an array, got an object"},
      {"/model/type", "\"WordPiece\"", "the unknown token \"[UNK]\" is not in the vocabulary"},
      {"/model", "{\"type\":\"Unigram\",\"vocab\":[[\"a\",-1],[\"b\",\"x\"]]}",
       "model.vocab[1]: expected a token and its score"},
      {"/model", "{\"vocab\":[[\"a\",-1]],\"unk_id\":1}", "model.unk_id: the id 1 is not in the vocabulary"},
      {"/model", "{\"vocab\":[[\"a\",-1],[\"b\",-1],[\"c\",-1],[\"d\",-1],[\"a\",-2]]}",
       "model.vocab[\"a\"]: duplicate token"},
      {"/model/vocab", "", "there is no `vocab`"},
      {"/model/vocab", "7", "model.vocab: expected an object"},
      {"/model/vocab", "{}", "the id 4 leaves holes"},
      {"/model/vocab/ab", "-1", "model.vocab[\"ab\"]: the id -1 is out of range"},
      {"/model/vocab/ab", "2147483648", "the id 2147483648 is out of range"},
      {"/model/vocab/ab", "18446744073709551615", "model.vocab[\"ab\"]: the number is out of range"},
      {"/model/vocab/ab", "1e3", "expected an integer, got a fraction"},
      {"/model/vocab/ab", "\"2\"", "model.vocab[\"ab\"]: expected an integer, got a string"},
      {"/model/vocab/ab", "1000000", "model.vocab[\"ab\"]: the id 1000000 leaves holes"},
      {"/model/vocab/ab", "1", "the id 1 belongs to \"b\" already"},
      {"/model/vocab/", "5", "the token of id 5 is empty"},
      {"/added_tokens/0/id", "5", "leaves holes"},
      {"/added_tokens/0/id", "3", "the id 3 belongs to \"abb\" already"},
      {"/added_tokens/0/id", "null", "added_tokens[0]: `id` and `content` are needed"},
      {"/added_tokens/0/content", "\"ab\"",
       "added_tokens[\"ab\"]: the id 4 is not that of the vocabulary, 2"},
      {"/added_tokens/0/content", "7", "added_tokens[0].content: expected a string"},
      {"/added_tokens/0/special", "\"yes\"", "added_tokens[0].special: expected a boolean, got a string"},
      {"/added_tokens", "{}", "added_tokens: expected an array"},
      {"/added_tokens/0", "3", "added_tokens[0]: expected an object"},
      {"/model/merges", "", "there is no `merges`"},
      {"/model/merges", "[[\"a\",\"x\"]]", "t.json: model.merges[0]: \"x\" is not in the vocabulary"},
      {"/model/merges", "[[\"a\",\"b\"],[\"b\",\"a\"]]", "model.merges[1]: \"ba\" is not in the vocabulary"},
      {"/model/merges", "[\"a b\",\"a  b\"]", "model.merges[1]: expected two tokens"},
      {"/model/merges", "[\"ab\"]", "model.merges[0]: expected two tokens"},
      {"/model/merges", "[[\"a\"]]", "model.merges[0]: expected a pair of strings"},
      {"/model/merges", "[[\"a\",1]]", "model.merges[0]: expected a pair of strings"},
      {"/model/merges", "[7]", "model.merges[0]: expected a pair of strings"},
      {"/model/merges", "{}", "model.merges: expected an array"},
      {"/model/dropout", "0.1", "model.dropout"},
      {"/model/dropout", "\"x\"", "model.dropout"},
      {"/model/unk_token", "5", "model.unk_token: expected a string"},
      {"/model/unk_token", "\"<unk>\"", "the unknown token \"<unk>\" is not in the vocabulary"},
      {"/model/ignore_merges", "1", "model.ignore_merges: expected a boolean"},
      {"/model/continuing_subword_prefix", "7", "model.continuing_subword_prefix: expected a string"},
      {"/normalizer", "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Stripe\"}]}",
       "normalizer.normalizers[1]: the normalizer \"Stripe\" is not supported"},
      {"/normalizer", "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"(a\"},\"content\":\"\"}",
       "normalizer.pattern: the regular expression"},
      {"/normalizer", "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"}}",
       "normalizer: there is no `content`"},
      {"/normalizer", "{\"type\":\"Prepend\"}", "normalizer: there is no `prepend`"},
      {"/normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"?\"}",
       "normalizer.precompiled_charsmap: expected base64"},
      {"/normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"\"}",
       "normalizer.precompiled_charsmap: the table of characters is broken: it has 0 bytes"},
      {"/normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"/////w==\"}",
       "its trie of 4294967295 bytes is larger than it is"},
      {"/normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"AwAAAAAAAAA=\"}",
       "a trie of 3 bytes"},
      {"/normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"BAAAAAAAAABh\"}",
       "the last text has no end"},
      {"/normalizer", "{\"kind\":1}", "normalizer: there is no `type`"},
      {"/pre_tokenizer", "{\"type\":\"UnicodeScripts\"}",
       "pre_tokenizer: the pre-tokenizer \"UnicodeScripts\" is not supported"},
      {"/pre_tokenizer", "{\"type\":\"Metaspace\"}", "pre_tokenizer: there is no `replacement`"},
      {"/pre_tokenizer", "{\"type\":\"Metaspace\",\"replacement\":\"__\"}",
       "pre_tokenizer.replacement: expected one character"},
      {"/pre_tokenizer", "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"last\"}",
       "pre_tokenizer.prepend_scheme: expected always, first or never"},
      {"/pre_tokenizer",
       "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\",\"add_prefix_space\":"
       "false}",
       "pre_tokenizer: add_prefix_space is false, but prepend_scheme is \"first\""},
      {"/pre_tokenizer", "{\"type\":\"Sequence\"}", "there is no `pretokenizers`"},
      {"/pre_tokenizer", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a(\"},\"behavior\":\"Isolated\"}",
       "pre_tokenizer.pattern: the regular expression"},
      {"/pre_tokenizer", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Sideways\"}",
       "pre_tokenizer.behavior: unknown behavior \"Sideways\""},
      {"/pre_tokenizer", "{\"type\":\"Split\",\"pattern\":{},\"behavior\":\"Isolated\"}",
       "expected one of `Regex` and `String`"},
      {"/pre_tokenizer", "{\"type\":\"Split\",\"pattern\":\"a\",\"behavior\":\"Isolated\"}",
       "pre_tokenizer.pattern: expected an object"},
      {"/decoder", "{\"type\":\"CTC\"}", "decoder: the decoder \"CTC\" is not supported"},
      {"/decoder", "{\"type\":\"Strip\",\"content\":\" \",\"start\":-1,\"stop\":0}",
       "decoder.start: the number -1 is out of range"},
      {"/post_processor", "{\"type\":\"Surprise\"}",
       "post_processor: the post-processor \"Surprise\" is not supported"},
      {"/post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[5]}",
       "post_processor.single[0]: expected an object"},
      {"/post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[]}", "the sequence A is missing"},
      {"/post_processor",
       "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{"
       "\"id\":\"A\"}}]}",
       "post_processor.single[0]: the token \"<s>\" is not in `special_tokens`"},
      {"/post_processor", "{\"type\":\"BertProcessing\",\"cls\":[\"a\",0],\"sep\":[\"b\"]}",
       "post_processor.sep: expected a token and its id"},
      {"/post_processor", "{\"type\":\"BertProcessing\",\"cls\":[\"a\",0],\"sep\":[\"b\",99]}",
       "the id 99 of the template belongs to no token"},
  };
  for (const Row& row : rows) {
    OrderedJson json = good();
    const OrderedJson::json_pointer pointer(row.pointer);
    if (*row.value)
      json[pointer] = capstan::ordered_json_of(row.value);
    else
      json[pointer.parent_pointer()].erase(pointer.back());
    CAPTURE(capstan::dump_json(json));
    const std::string message = error_of(capstan::dump_json(json));
    CAPTURE(message);
    CHECK(message.find("t.json") == 0);
    CHECK(message.find(row.says) != std::string::npos);
  }
}

// As in the package tokenizers, the ids of the vocabulary are kept, and an added token that it lacks gets the
// next id.
TEST_CASE("tokenizer.json: ids that no token has") {
  OrderedJson json = capstan::ordered_json_of(byte_tokenizer()->files()[0].text);
  json["model"]["vocab"]["<x>"] = 300;
  json["added_tokens"][1] = json["added_tokens"][0];
  json["added_tokens"][1]["id"] = 300;
  json["added_tokens"][1]["content"] = "<x>";
  for (const char* decoder : {"ByteLevel", "WordPiece", "Fuse"}) {
    CAPTURE(decoder);
    json["decoder"] = {{"type", decoder}};
    if (json["decoder"]["type"] == "WordPiece")
      json["decoder"].update({{"prefix", "##"}, {"cleanup", false}});
    const auto tokenizer = Tokenizer::from_json(capstan::dump_json(json));
    CHECK(tokenizer->vocab_size() == 301);
    CHECK(tokenizer->encode("a<x>b") == std::vector<int32_t>{'a', 300, 'b'});
    CHECK(tokenizer->decode(std::vector<int32_t>{299, 'a', 257, 299}) == "a");
    CHECK(tokenizer->decode(std::vector<int32_t>{257, 300, 299}) == "<x>");
    CHECK(tokenizer->decode(std::vector<int32_t>{257, 300, 299}, true) == "");
    CHECK(tokenizer->token_of(257) == "");
    CHECK(tokenizer->bytes_of(299) == "");
    CHECK(!tokenizer->is_special(299));
    IncrementalDecoder incremental(tokenizer);
    CHECK(incremental.push(299) + incremental.push('a') + incremental.push(280) + incremental.finish() ==
          "a");
  }
  // An added token after the vocabulary, and one in a gap of its ids.
  for (const int32_t id : {301, 257}) {
    json["added_tokens"][2] = json["added_tokens"][1];
    json["added_tokens"][2]["id"] = id;
    json["added_tokens"][2]["content"] = "<y>";
    CHECK(Tokenizer::from_json(capstan::dump_json(json))->encode("<y><x>") == std::vector<int32_t>{id, 300});
  }
  json["added_tokens"][2]["id"] = 302;
  CHECK(error_of(capstan::dump_json(json)) ==
        "t.json: added_tokens: the id 302 leaves holes: no token has the id 301");
  // An added token without text is ignored.
  json["added_tokens"][2]["content"] = "";
  CHECK(Tokenizer::from_json(capstan::dump_json(json))->vocab_size() == 301);

  json["added_tokens"].erase(2);
  for (const int64_t id : {66567, 66568, 2147483646}) {
    json["model"]["vocab"]["<x>"] = id;
    json["added_tokens"][1]["id"] = id;
    CHECK(error_of(capstan::dump_json(json)) ==
          (id == 66567 ? std::string()
                       : "t.json: model.vocab[\"<x>\"]: the id " + std::to_string(id) +
                             " leaves holes, too many of them: for 258 tokens ids end at 66567"));
  }
}

TEST_CASE("tokenizer.json: text that is no JSON, or too much of it") {
  CHECK(error_of("").find("t.json is empty") == 0);
  CHECK(error_of("  \n ").find("t.json is empty") == 0);
  CHECK(error_of("{\n  \"model\": {,}\n}").find("t.json:2:13: ") == 0);
  CHECK(error_of("{\"model\": tru}").find("t.json:1:") == 0);
  CHECK(error_of("[1,2]").find("t.json: expected an object, got an array") == 0);
  CHECK(error_of("{\"a\": \"\xFF\"}").find("t.json:1:8: invalid UTF-8 at byte 7") == 0);
  CHECK(error_of("{\"a\": \"\\ud800\"}") != "");
  CHECK(error_of("{\"model\":{},\"model\":{}}") == "t.json: duplicate key \"model\"");
  CHECK(error_of("{} {}") != "");
  const std::string deep = "{\"model\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  CHECK(error_of(deep).find("nested more than 64 deep") != std::string::npos);
  CHECK(error_of(std::string((64 << 20) + 1, ' ')).find("the limit is 67108864") != std::string::npos);
  std::string duplicate = capstan::dump_json(good());
  duplicate.replace(duplicate.find("\"abb\":3"), 7, "\"ab\":3");
  CHECK(error_of(duplicate).find("t.json: model.vocab[\"ab\"]: duplicate token") == 0);
  OrderedJson json = good();
  json["model"]["vocab"] = {{"a", 0}, {"b", 1}, {"", 2}, {"ab", 3}};
  CHECK(error_of(capstan::dump_json(json)).find("the token of id 2 is empty") != std::string::npos);
  json = good();
  json["added_tokens"].push_back(json["added_tokens"][0]);
  CHECK(error_of(capstan::dump_json(json)) != "");
  json = good();
  json["added_tokens"][0]["content"] = std::string(5000, 'x');
  CHECK(error_of(capstan::dump_json(json)).find("has more than 1024 bytes") != std::string::npos);
  json = good();
  json["added_tokens"][0]["content"] = "  ";
  json["added_tokens"][0]["rstrip"] = true;
  CHECK(error_of(capstan::dump_json(json)).find("white space") != std::string::npos);
  json = good();
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", OrderedJson::array()}};
  for (int i = 0; i < 65; ++i) json["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
  CHECK(error_of(capstan::dump_json(json)).find("there are more than 64 steps") != std::string::npos);
  // Steps that double the text stop with an error when it is too long.
  json = good();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", OrderedJson::array()}};
  for (int i = 0; i < 60; ++i)
    json["normalizer"]["normalizers"].push_back(
        {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  json["added_tokens"] = OrderedJson::array();
  json["model"]["vocab"]["c"] = 4;
  const auto bomb = Tokenizer::from_json(capstan::dump_json(json));
  CHECK_THROWS_WITH_AS(bomb->encode("ba"), doctest::Contains("steps expand a text to more than"), Error);
  json["normalizer"]["normalizers"][0]["content"] = std::string(2000, 'a');
  CHECK(error_of(capstan::dump_json(json)).find("normalizer.normalizers[0].content: has 2000 bytes") !=
        std::string::npos);
  // Every prefix of a tokenizer.json gives an error without a crash.
  const std::string complete = capstan::dump_json(good());
  for (size_t size = 0; size < complete.size(); ++size) CHECK(error_of(complete.substr(0, size)) != "");
}

TEST_CASE("tokenizer.json: every byte changed gives a tokenizer or an error") {
  const std::string complete = capstan::dump_json(good());
  for (size_t i = 0; i < complete.size(); ++i)
    for (const char c : {'\0', '"', '}', '9', '\xFF'}) {
      std::string text = complete;
      text[i] = c;
      try {
        const auto tokenizer = Tokenizer::from_json(text);
        tokenizer->decode(tokenizer->encode("abba <s> ab"));
      } catch (const Error&) {
      }
    }
}

TEST_CASE("tokenizer: large files load fast") {
  // A tokenizer as large as Llama 3's: 128 000 tokens, 280 000 merges.
  std::vector<std::string> tokens;
  std::string
      json =
          R"({"version":"1.0","pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","vocab":{)",
      merges;
  const std::string letters = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRST";  // 56
  for (const char c : letters) tokens.emplace_back(1, c);
  for (const char a : letters)
    for (const char b : letters) tokens.push_back({a, b});
  for (size_t i = 0; tokens.size() < 128'000; ++i) tokens.push_back(tokens[56 + i / 56] + letters[i % 56]);
  for (size_t i = 0; i < tokens.size(); ++i)
    json += (i ? ",\"" : "\"") + tokens[i] + "\":" + std::to_string(i);
  for (size_t i = 56; i < tokens.size(); ++i) {
    const std::string& token = tokens[i];
    merges += (i > 56 ? ",[\"" : "[\"") + token.substr(0, token.size() - 1) + "\",\"" + token.back() + "\"]";
    if (token.size() > 2) merges += ",[\"" + token.substr(0, 1) + "\",\"" + token.substr(1) + "\"]";
  }
  json += "},\"merges\":[" + merges + "]}}";
  const auto start = std::chrono::steady_clock::now();
  const auto tokenizer = Tokenizer::from_json(json);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(tokenizer->vocab_size() == 128'000);
  CHECK(tokenizer->encode("abcabc").size() == 2);
  MESSAGE(std::to_string(json.size()) << " bytes in " << seconds << " s");
}

TEST_CASE("tokenizer: a vocabulary and merges under any names, with each pre-tokenizer") {
  const Directory directory;
  const std::pair<const char*, PreTokenizerChoice> cases[] = {
      {"gpt2.json", PreTokenizerChoice::gpt2},
      {"llama3_ignore_merges.json", PreTokenizerChoice::llama3},
      {"trained_qwen2.json", PreTokenizerChoice::qwen2}};
  for (const auto& [name, choice] : cases) {
    CAPTURE(name);
    const OrderedJson complete = capstan::ordered_json_of(read_file(fixtures::path(name)));
    std::string merges = "#version: 0.2\n\n";
    for (const auto& merge : complete["model"]["merges"])
      merges += (merge.is_array() ? merge[0].get<std::string>() + " " + merge[1].get<std::string>()
                                  : merge.get<std::string>()) +
                "\n";
    directory.write("encoder.json", capstan::dump_json(complete["model"]["vocab"]));
    directory.write("vocab.bpe", merges);
    const auto pair =
        Tokenizer::load_pair(directory.path / "encoder.json", directory.path / "vocab.bpe", choice);
    const auto expected = Tokenizer::load(fixtures::path(name));
    EncodeOptions as_text;
    as_text.specials_as_text = true;
    for (const auto& sample : fixtures::samples())
      CHECK(pair->encode(sample, as_text) == expected->encode(sample, as_text));
    // Added tokens that vocab.json lacks are not part of the pair.
    CHECK((pair->identity() == expected->identity()) == (pair->vocab_size() == expected->vocab_size()));
    REQUIRE(pair->files().size() == 1);
    CHECK(pair->files()[0].name == "tokenizer.json");
    directory.write("vocab.bpe", merges + "a zz\n");
    CHECK_THROWS_WITH_AS(
        Tokenizer::load_pair(directory.path / "encoder.json", directory.path / "vocab.bpe", choice),
        doctest::Contains("\"zz\" is not in the vocabulary"), Error);
  }
}

TEST_CASE("tokenizer: directories, the files to keep, hashes") {
  const Directory directory;
  const OrderedJson gpt2 = capstan::ordered_json_of(read_file(fixtures::path("gpt2.json")));
  std::string merges = "#version: 0.2\n";
  for (const auto& merge : gpt2["model"]["merges"])
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  CHECK_THROWS_WITH_AS(Tokenizer::load(directory.path),
                       doctest::Contains("none of tokenizer.json, tokenizer.model, vocab.json"), Error);
  CHECK_THROWS_AS(Tokenizer::load(directory.path / "missing.json"), Error);
  directory.write("vocab.json", capstan::dump_json(gpt2["model"]["vocab"]));
  directory.write("merges.txt", merges);
  const auto samples = fixtures::samples();
  {
    const auto tokenizer = Tokenizer::load(directory.path);
    const auto expected = fixtures::expected_ids("gpt2");
    for (size_t i = 0; i < samples.size(); ++i) CHECK(tokenizer->encode(samples[i]) == expected[i]);
    REQUIRE(tokenizer->files().size() == 2);
    CHECK(tokenizer->files()[0].name == "vocab.json");
    CHECK(tokenizer->files()[1].name == "merges.txt");
  }
  directory.write("merges.txt", merges + "no such pair\n");
  CHECK_THROWS_WITH_AS(Tokenizer::load(directory.path),
                       doctest::Contains("merges.txt:445: expected two tokens"), Error);
  directory.write("merges.txt", "a zz\n");
  CHECK_THROWS_WITH_AS(Tokenizer::load(directory.path),
                       doctest::Contains("merges.txt:1: \"zz\" is not in the vocabulary"), Error);
  directory.write("merges.txt", merges);

  // For Qwen's pair of files, tokenizer_config.json gives the class, which determines the pattern, and added
  // tokens.
  const OrderedJson qwen = capstan::ordered_json_of(read_file(fixtures::path("qwen2_nfc.json")));
  merges.clear();
  for (const auto& merge : qwen["model"]["merges"])
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\r\n";
  OrderedJson config = {{"tokenizer_class", "Qwen2Tokenizer"},
                        {"eos_token", "<|im_end|>"},
                        {"bos_token", nullptr},
                        {"added_tokens_decoder", OrderedJson::object()}};
  for (const auto& token : qwen["added_tokens"]) {
    OrderedJson fields = token;
    fields.erase("id");
    config["added_tokens_decoder"][std::to_string(token["id"].get<int>())] = fields;
  }
  directory.write("vocab.json", capstan::dump_json(qwen["model"]["vocab"]));
  directory.write("merges.txt", merges);
  directory.write("tokenizer_config.json", capstan::dump_json(config));
  {
    const auto tokenizer = Tokenizer::load(directory.path);
    const auto expected = fixtures::expected_ids("qwen2_nfc");
    for (size_t i = 0; i < samples.size(); ++i) CHECK(tokenizer->encode(samples[i]) == expected[i]);
    CHECK(tokenizer->eos() == tokenizer->id_of("<|im_end|>"));
    CHECK(tokenizer->eod() == tokenizer->id_of("<|endoftext|>"));
    CHECK(tokenizer->files().size() == 3);
  }
  config["tokenizer_class"] = "LlamaTokenizer";
  directory.write("tokenizer_config.json", capstan::dump_json(config));
  CHECK_THROWS_WITH_AS(Tokenizer::load(directory.path),
                       doctest::Contains("tokenizer_class: \"LlamaTokenizer\""), Error);
  directory.write("tokenizer_config.json", "{");
  CHECK_THROWS_WITH_AS(Tokenizer::load(directory.path), doctest::Contains("tokenizer_config.json:1:"), Error);

  // A tokenizer.json has precedence over the pair of files.
  directory.write("tokenizer.json", read_file(fixtures::path("llama3_ignore_merges.json")));
  directory.write("tokenizer_config.json", R"({"eos_token":{"content":"<|end_of_text|>","lstrip":false}})");
  const auto tokenizer = Tokenizer::load(directory.path);
  CHECK(tokenizer->eod() == tokenizer->id_of("<|end_of_text|>"));
  REQUIRE(tokenizer->files().size() == 2);
  CHECK(tokenizer->files()[0].name == "tokenizer.json");
  CHECK(tokenizer->files()[0].hash.size() == 32);
  const fs::path copy = directory.path / "copy";
  fs::create_directories(copy);
  tokenizer->write_to(copy);
  const auto again = Tokenizer::load(copy);
  CHECK(again->content_hash() == tokenizer->content_hash());
  CHECK(again->content_hash() != Tokenizer::load(fixtures::path("gpt2.json"))->content_hash());
  directory.write("tokenizer.json", "{}");
  CHECK_THROWS_WITH_AS(tokenizer->write_to(copy), doctest::Contains("has changed"), Error);
  byte_tokenizer()->write_to(copy);
  CHECK(Tokenizer::load(copy / "tokenizer.json")->content_hash() == byte_tokenizer()->content_hash());
}

TEST_CASE("tokenizer: the identity is of what a tokenizer does, not of how its files are written") {
  // The identity is recorded beside datasets. If it changed, datasets prepared before would be refused.
  CHECK(byte_tokenizer()->identity() == "d6cde2b9f9f33398ca9eef9b43bc04f4");
  const Directory directory;
  std::set<std::string> seen;
  for (const char* name : {"gpt2.json", "llama3_ignore_merges.json", "qwen2_nfc.json", "smollm_digits.json",
                           "trained_llama3.json", "families/t5.json", "families/bert_cased.json",
                           "families/llama2.json", "families/spm_bpe.model", "families/spm_unigram.model"}) {
    CAPTURE(name);
    const auto tokenizer = Tokenizer::load(fixtures::path(name));
    const std::string identity = tokenizer->identity();
    CHECK(identity.size() == 32);
    CHECK(seen.insert(identity).second);
    const fs::path copy = directory.path / "copy";
    fs::remove_all(copy);
    fs::create_directories(copy);
    tokenizer->write_to(copy);
    CHECK(Tokenizer::load(copy)->identity() == identity);
    if (!std::string(name).ends_with(".json")) continue;
    const std::string text = read_file(fixtures::path(name));
    OrderedJson json = capstan::ordered_json_of(text);
    json["truncation"] = nullptr;
    json["post_processor"] = nullptr;
    // Another layout, another order of keys.
    CHECK(Tokenizer::from_json(capstan::dump_json(json))->identity() == identity);
    if (json["model"]["type"] != "BPE") continue;
    // The same tokens, other merges; other normalization; one token more.
    OrderedJson merges = json, lower = json, more = json;
    auto& list = merges["model"]["merges"];
    std::reverse(list.begin(), list.end());
    CHECK(Tokenizer::from_json(capstan::dump_json(merges))->identity() != identity);
    lower["normalizer"] = {{"type", "Lowercase"}};
    CHECK(Tokenizer::from_json(capstan::dump_json(lower))->identity() != identity);
    more["added_tokens"].push_back({{"id", tokenizer->vocab_size()},
                                    {"content", "<|one more|>"},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false},
                                    {"special", true}});
    CHECK(Tokenizer::from_json(capstan::dump_json(more))->identity() != identity);
  }
  CHECK(Tokenizer::load(fixtures::path("gpt2.json"))->identity() !=
        Tokenizer::load(fixtures::path("gpt2_prefix_added.json"))->identity());
}

TEST_CASE("files: encode and decode files") {
  const Directory directory;
  const auto tokenizer = Tokenizer::load(fixtures::path("gpt2.json"));
  std::string text;
  for (int round = 0; round < 60; ++round)
    for (const auto& sample : fixtures::samples()) text += sample + "\n";
  for (const std::string& content : {text, text + "no newline at the end", std::string(), std::string("\n"),
                                     std::string("x"), std::string("\n\n \r\n")}) {
    const auto file = directory.write("text.txt", content);
    std::string lines[2];
    for (const int threads : {1, 3}) {
      ThreadPool pool(threads);
      std::string& out = lines[threads / 2];
      int64_t last = -1;
      const auto totals = encode_file(
          *tokenizer, file, [&](std::string_view part) { out += part; }, pool,
          [&](int64_t done, int64_t total) {
            CHECK(total == static_cast<int64_t>(content.size()));
            last = done;
          });
      CHECK(totals.bytes == static_cast<int64_t>(content.size()));
      CHECK(totals.lines == static_cast<int64_t>(std::count(out.begin(), out.end(), '\n')));
      if (!content.empty()) CHECK(last == static_cast<int64_t>(content.size()));
    }
    CHECK(lines[0] == lines[1]);
    ThreadPool pool(2);
    std::string back;
    decode_file(
        *tokenizer, directory.write("ids.jsonl", lines[0]), [&](std::string_view part) { back += part; },
        pool);
    CHECK(back == content);
  }
  ThreadPool pool(2);
  std::string out;
  const auto sink = [&](std::string_view part) { out += part; };
  encode_file(*tokenizer, directory.write("a.txt", "a b\n<|endoftext|>\n"), sink, pool);
  const auto a = std::to_string(*tokenizer->id_of("a")), b = std::to_string(*tokenizer->id_of("Ġb"));
  CHECK(out == "{\"ids\":[" + a + "," + b + "]}\n{\"ids\":[0]}\n");
  out.clear();
  encode_file(*tokenizer, directory.write("b.txt", "a b\n\n\xC3\xA9"), sink, pool, {}, {}, true);
  CHECK(out.find("{\"ids\":[" + a + "," + b +
                 "],\"offsets\":[[0,1],[1,3]]}\n{\"ids\":[],\"offsets\":[]}\n") == 0);
  CHECK(out.find("\"offsets\":[[0,2]") != std::string::npos);
  const std::pair<const char*, const char*> bad[] = {
      {"{\"ids\":[1]}\n{\"ids\":[700]}\n", "bad.jsonl:2: the id 700 is not in the vocabulary of 700 tokens"},
      {"{\"ids\":[-1]}\n", "bad.jsonl:1: the id -1"},
      {"{\"ids\":[1.5]}\n", "expected integers"},
      {"{\"ids\":3}\n", "expected an object with an array `ids`"},
      {"[1,2]\n", "expected an object with an array `ids`"},
      {"{\"ids\":[1]}\n\n", "bad.jsonl:2: "},
      {"{\"ids\":[1", "bad.jsonl:1: "},
      {"{\"ids\":[1],\"newline\":1}", "expected a boolean"},
      {"{\"ids\":[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]}", "bad.jsonl:1: "},
  };
  for (const auto& [content, says] : bad)
    CHECK_THROWS_WITH_AS(decode_file(*tokenizer, directory.write("bad.jsonl", content), sink, pool),
                         doctest::Contains(says), Error);
  CHECK_THROWS_AS(encode_file(*tokenizer, directory.path / "missing", sink, pool), Error);
  CHECK_THROWS_AS(encode_file(*tokenizer, directory.path, sink, pool), Error);
}

TEST_CASE("train from files") {
  const Directory directory;
  std::string text;
  for (const auto& sample : fixtures::samples()) text += sample + "\n";
  const std::vector<fs::path> files = {directory.write("text.txt", text)};
  ThreadPool pool(2);
  const auto tokenizer = Tokenizer::from_json(train_bpe(files, {.vocab_size = 500}, pool), "tokenizer.json");
  CHECK(tokenizer->vocab_size() == 500);
  CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  const std::vector<fs::path> missing = {directory.path / "none.txt"};
  CHECK_THROWS_AS(train_bpe(missing, {.vocab_size = 500}, pool), Error);
}
