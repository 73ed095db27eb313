// Tests malformed SentencePiece models, character tables, and directories with older files.
#include <doctest/doctest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "text/tokenizer/charsmap.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
namespace fixtures = tokenizer_fixtures;
namespace fs = std::filesystem;

namespace {

// The wire format of Protocol Buffers.
std::string varint(uint64_t value) {
  std::string result;
  for (; value >= 0x80; value >>= 7) result += static_cast<char>(value | 0x80);
  return result + static_cast<char>(value);
}
std::string field(uint32_t number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string field(uint32_t number, uint64_t value) {
  return varint(number << 3) + varint(value);
}
std::string field(uint32_t number, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  std::string result = varint(number << 3 | 5);
  for (int shift = 0; shift < 32; shift += 8) result += static_cast<char>(bits >> shift);
  return result;
}
enum Type : uint64_t { normal = 1, unknown, control, user_defined, unused, byte };
std::string piece(const std::string& text, float score, uint64_t type = normal) {
  return field(1, field(1, text) + field(2, score) + field(3, type));
}
std::string pieces() {
  return piece("<unk>", 0, unknown) + piece("<s>", 0, control) + piece("</s>", 0, control) +
         piece("\xE2\x96\x81", -3) + piece("a", -2) + piece("b", -2.5F) + piece("ab", -1);
}
std::string trainer(uint64_t type = 2) {
  return field(2, field(3, type));
}

std::string model_error(const std::string& model) {
  try {
    const auto tokenizer = Tokenizer::from_sentencepiece(model, "t.model");
    tokenizer->decode(tokenizer->encode("ab \xFF c"));
  } catch (const Error& error) {
    CHECK((error.code() == ErrorCode::format || error.code() == ErrorCode::unsupported));
    CHECK(error.message().find("t.model") == 0);
    return error.message();
  }
  return "";
}

}  // namespace

TEST_CASE("sentencepiece: errors name the problem and its location") {
  CHECK(model_error(pieces() + trainer()) == "");
  const auto good = Tokenizer::from_sentencepiece(pieces() + trainer());
  CHECK(good->encode("ab  ba") == std::vector<int32_t>{3, 6, 3, 5, 4});
  CHECK(good->encode("abc") == std::vector<int32_t>{3, 6, 0});
  CHECK(good->decode(good->encode("ab c")) == "ab  \xE2\x81\x87 ");
  CHECK(good->encode("") == std::vector<int32_t>{});
  const std::string nan = piece("c", std::numeric_limits<float>::quiet_NaN()),
                    infinite = piece("c", -std::numeric_limits<float>::infinity());
  const std::pair<std::string, const char*> rows[] = {
      {"", "there are no pieces"},
      {trainer(), "there are no pieces"},
      {"\n", "byte 1: the file ends inside a number"},
      {"\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01",
       "field 1 asks for 18446744073709551615 bytes, there are 0"},
      {"\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02", "a number has more than 64 bits"},
      {"\x0A\x7Fxyz", "field 1 asks for 127 bytes, there are 3"},
      {"\x0B", "field 1 is of an unknown kind"},
      {std::string("\x02\0", 2), "a field has no valid number"},
      {field(1, uint64_t{7}), "field 1 should hold bytes"},
      {field(1, field(1, "a") + field(2, "no number")), "field 2 should hold a number"},
      {field(1, field(1, "a") + field(3, 1.0F)), "field 3 should hold an integer"},
      {pieces() + piece("", -1), "pieces[7]: the piece is empty"},
      {pieces() + piece("\xFF", -1), "pieces[7]: the piece is not UTF-8"},
      {pieces() + nan, "pieces[7]: the score is not a number"},
      {pieces() + infinite, "pieces[7]: the score is not a number"},
      {pieces() + piece("c", -1, 9), "pieces[7]: there is no type 9"},
      {pieces() + piece("<0x4>", 0, byte), "pieces[7]: \"<0x4>\" is not a byte"},
      {pieces() + piece("?", 0, unknown), "pieces[7]: there are two unknown pieces, \"<unk>\" and \"?\""},
      {piece("a", -1) + trainer(), "no piece is of the type UNKNOWN"},
      {pieces() + piece("ab", -4) + trainer(), "pieces[\"ab\"]: duplicate token"},
      {pieces() + trainer(3), "trainer_spec.model_type: WORD is not supported"},
      {pieces() + trainer(4), "trainer_spec.model_type: CHAR is not supported"},
      {pieces() + trainer(77), "trainer_spec.model_type: 77"},
      {pieces() + piece("<0x41>", 0, byte) + trainer(),
       "there are 1 pieces for bytes, but trainer_spec.byte_fallback is false"},
      {pieces() + field(2, field(3, uint64_t{2}) + field(35, uint64_t{1})), "there are 0 pieces for bytes"},
      {pieces() + trainer() + field(3, field(2, "abc")),
       "precompiled_charsmap: the table of characters is broken: it has 3 bytes"},
      {pieces() + trainer() + field(3, field(2, "\xFF\xFF\xFF\xFFxx")),
       "its trie of 4294967295 bytes is larger"},
      {pieces() + trainer() + field(3, field(2, std::string("\4\0\0\0\0\0\0\0a", 9))),
       "the last text has no end"},
      {pieces() + trainer() + field(5, field(2, "abc")), "denormalizer_spec"},
  };
  for (const auto& [model, says] : rows) {
    const std::string message = model_error(model);
    CAPTURE(message);
    CHECK(message.find(says) != std::string::npos);
  }
  // Every prefix, and every byte changed, gives a tokenizer or an error.
  const std::string complete = pieces() + field(3, field(1, "x") + field(4, uint64_t{1})) + trainer(1);
  for (size_t size = 0; size < complete.size(); ++size) model_error(complete.substr(0, size));
  for (size_t i = 0; i < complete.size(); ++i)
    for (const char c : {'\0', '\1', '\x0A', '\x7F', '\xFF'}) {
      std::string changed = complete;
      changed[i] = c;
      model_error(changed);
    }
}

TEST_CASE("sentencepiece: unused pieces are split again, user-defined ones always win") {
  for (const uint64_t type : {1, 2}) {
    CAPTURE(type);
    const auto tokenizer = Tokenizer::from_sentencepiece(pieces() + piece("abb", 0, unused) +
                                                         piece("<t>", 0, user_defined) + trainer(type));
    CHECK(tokenizer->encode("abb") == std::vector<int32_t>{3, 6, 5});
    CHECK(tokenizer->encode("a<t>b") == std::vector<int32_t>{3, 4, 8, 5});
    CHECK(tokenizer->encode("<s>a").back() == 4);
    CHECK(tokenizer->encode("<s>a")[1] == 0);  // control pieces are not found in text
    CHECK(tokenizer->is_special(1));
  }
}

TEST_CASE("charsmap: hostile tables match nothing outside of themselves") {
  for (uint32_t unit : {0u, 0xFFFFFFFFu, 0x7FFFFFFFu, 0x80000000u, 0x000003FFu, 0xFFFFFF00u, 0x00000500u}) {
    std::string blob("\x08\0\0\0", 4);
    for (int i = 0; i < 2; ++i)
      for (int shift = 0; shift < 32; shift += 8) blob += static_cast<char>(unit >> shift);
    blob += std::string("x\0", 2);
    const Charsmap map(blob, "t");
    for (int c = 0; c < 256; ++c) {
      const std::string text(3, static_cast<char>(c));
      if (const auto match = map.longest(text)) CHECK(match->bytes <= 3);
      if (const auto match = map.shortest(text)) CHECK(match->text.size() <= 1);
    }
  }
}

TEST_CASE("tokenizer: directories of SentencePiece and BERT, names of special tokens") {
  const fs::path path =
      fs::temp_directory_path() / ("capstan_tokenizer_models_" + std::to_string(::getpid()));
  fs::create_directories(path);
  const auto write = [&](const char* name, const std::string& content) {
    std::ofstream(path / name, std::ios::binary) << content;
  };
  EncodeOptions around;
  around.add_special = true;
  write("tokenizer.model", read_file(fixtures::path("families/spm_bpe.model")));
  {
    const auto tokenizer = Tokenizer::load(path);
    const auto plain = Tokenizer::load(fixtures::path("families/spm_bpe.model"));
    for (const auto& sample : fixtures::samples()) CHECK(tokenizer->encode(sample) == plain->encode(sample));
    CHECK(tokenizer->encode("a", around) == tokenizer->encode("a"));
  }
  write("tokenizer_config.json", R"({"tokenizer_class":"LlamaTokenizer","pad_token":{"content":"</s>"},
    "added_tokens_decoder":{"700":{"content":"<|new|>","special":true}}})");
  {
    const auto tokenizer = Tokenizer::load(path);
    auto ids = tokenizer->encode("a<|new|>");
    CHECK(ids.back() == 700);
    CHECK(tokenizer->pad() == 2);
    CHECK(tokenizer->decode(ids) == "a<|new|>");
    ids.insert(ids.begin(), 1);
    CHECK(tokenizer->encode("a<|new|>", around) == ids);
    const fs::path copy = path / "copy";
    fs::create_directories(copy);
    tokenizer->write_to(copy);
    CHECK(Tokenizer::load(copy)->content_hash() == tokenizer->content_hash());
  }
  fs::remove(path / "tokenizer.model");

  auto json = capstan::json_of(read_file(fixtures::path("families/bert_uncased.json")));
  json["model"]["max_input_chars_per_word"] = 100;
  std::vector<std::string> lines(json["model"]["vocab"].size());
  for (const auto& [token, id] : json["model"]["vocab"].items()) lines[id.get<size_t>()] = token;
  write("vocab.txt", join(lines, "\r\n") + "\n");
  write("tokenizer_config.json", R"({"do_lower_case":true,"tokenizer_class":"BertTokenizer"})");
  {
    const auto tokenizer = Tokenizer::load(path);
    const auto expected = Tokenizer::from_json(capstan::dump_json(json));
    for (const auto& sample : fixtures::samples())
      CHECK(tokenizer->encode(sample, around) == expected->encode(sample, around));
    CHECK(tokenizer->pad() == 0);
    CHECK(tokenizer->unk() == 1);
  }
  // tokenizer_config.json determines the tokens around a text; special_tokens_map.json names tokens that it
  // omits.
  write("tokenizer.json", read_file(fixtures::path("families/llama2.json")));
  write("tokenizer_config.json", R"({"bos_token":"<s>","add_bos_token":false,"add_eos_token":true})");
  write("special_tokens_map.json", R"({"eos_token":{"content":"</s>"},"bos_token":"<unk>"})");
  const auto tokenizer = Tokenizer::load(path);
  CHECK(tokenizer->bos() == 1);
  CHECK(tokenizer->eos() == 2);
  auto ids = tokenizer->encode("text");
  ids.push_back(2);
  CHECK(tokenizer->encode("text", around) == ids);
  fs::remove_all(path);
}
