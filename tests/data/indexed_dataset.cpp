#include "data/indexed_dataset.hpp"

#include <doctest/doctest.h>

#include <sys/stat.h>
#include <ctime>

#include <cstring>
#include <functional>

#include "data/sample_order.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

std::string from_hex(std::string_view hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size();) {
    if (hex[i] == ' ') {
      ++i;
      continue;
    }
    out.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
    i += 2;
  }
  return out;
}

std::vector<int32_t> read_all(const IndexedDataset& dataset, int64_t sequence) {
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.length(sequence)));
  dataset.read(sequence, 0, tokens);
  return tokens;
}

template <class T>
void poke(std::string& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

// VmRSS of this process in bytes.
int64_t resident_bytes() {
  std::ifstream status("/proc/self/statm");
  int64_t size = 0, resident = 0;
  status >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE("the golden dataset, byte for byte") {
  const TempDirectory directory;
  write_dataset(directory / "golden", {{1, 2, 3}, {4, 5}});
  CHECK(read_file(directory / "golden.bin") == from_hex("01000200030004000500"));
  CHECK(read_file(directory / "golden.idx") ==
        from_hex("4d4d49444944580000 0100000000000000 08 0200000000000000 0300000000000000 03000000 02000000"
                 "0000000000000000 0600000000000000 0000000000000000 0100000000000000 0200000000000000"));
  int left = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) ++left;
  CHECK(left == 2);  // no temporary file stays
}

TEST_CASE("datasets of megatron-core are read, and written with the same bytes") {
  for (const bool wide : {false, true}) {
    const std::string name = wide ? "small_i32" : "small_u16";
    const int32_t high = wide ? 128000 : 65499;
    const TempDirectory directory;
    IndexedWriter writer(directory / name, wide ? TokenType::i32 : TokenType::u16);
    const auto add = [&](std::vector<int32_t> tokens, std::vector<int32_t> lengths) {
      writer.add_document(tokens, lengths);
    };
    add({1, 2, 3}, {3});
    add({}, {});
    add({4, 5, 6}, {2, 1});
    add({7, 8, 9, 10, high}, {5});
    add({}, {});
    writer.finish();
    for (const char* part : {".bin", ".idx"})
      CHECK(read_file(directory / (name + part)) == read_file(fixture(name + part)));

    const IndexedDataset dataset(fixture(name));
    CHECK(dataset.documents() == 5);
    CHECK(dataset.sequences() == 4);
    CHECK(dataset.tokens() == 11);
    CHECK(dataset.type() == (wide ? TokenType::i32 : TokenType::u16));
    CHECK(!dataset.multimodal());
    CHECK(dataset.document_begin(2) == 1);
    CHECK(dataset.document_begin(3) == 3);
    CHECK(dataset.document_begin(5) == 4);
    CHECK(read_all(dataset, 1) == std::vector<int32_t>{4, 5});
    CHECK(read_all(dataset, 3) == std::vector<int32_t>{7, 8, 9, 10, high});
    std::vector<int32_t> part(2);
    dataset.read(3, 3, part);
    CHECK(part == std::vector<int32_t>{10, high});
    CHECK(dataset.first_token(3) == 6);
    CHECK(dataset.first_token(4) == 11);
  }
}

TEST_CASE("the type follows the vocabulary as in Megatron; every integer type is read") {
  CHECK(token_type_for_vocab(256) == TokenType::u16);
  CHECK(token_type_for_vocab(65499) == TokenType::u16);
  CHECK(token_type_for_vocab(65500) == TokenType::i32);
  const TempDirectory directory;
  for (const auto type :
       {TokenType::u8, TokenType::i8, TokenType::i16, TokenType::u16, TokenType::i32, TokenType::i64}) {
    const auto prefix = directory / std::string(name_of(type));
    write_dataset(prefix, {{0, 1, 127}, {5}}, type);
    const IndexedDataset dataset(prefix);
    CHECK(dataset.type() == type);
    CHECK(read_all(dataset, 0) == std::vector<int32_t>{0, 1, 127});
    CHECK(read_all(dataset, 1) == std::vector<int32_t>{5});
  }
  CHECK(error_of([&] { write_dataset(directory / "x", {{65536}}); }).find("token 65536 does not fit") !=
        std::string::npos);
  CHECK(error_of([&] { write_dataset(directory / "x", {{-1}}, TokenType::i32); }).find("token -1") !=
        std::string::npos);
  CHECK(!std::filesystem::exists(directory / "x.bin"));
}

TEST_CASE("an empty dataset and one without documents are legal") {
  const TempDirectory directory;
  write_dataset(directory / "none", {});
  const IndexedDataset none(directory / "none");
  CHECK(none.documents() == 0);
  CHECK(none.tokens() == 0);
  write_dataset(directory / "empty", {{}, {}});
  CHECK(IndexedDataset(directory / "empty").documents() == 2);
}

TEST_CASE("hostile .idx and .bin: a clear error with file and offset, never a crash") {
  // Layout of the index under attack: S = 2, D = 3: lengths at 34, pointers at 42, documents at 58, end
  // at 82.
  struct Case {
    const char* what;
    std::function<void(std::string& index, std::string& bin)> damage;
    const char* expected;
  };
  const auto at = [](size_t offset, auto value) {
    return [=](std::string& index, std::string&) { poke(index, offset, value); };
  };
  const Case cases[] = {
      {"magic", at(0, 'X'), ".idx: offset 0: not the index of an indexed dataset"},
      {"empty index", [](std::string& index, std::string&) { index.clear(); },
       "offset 0: the magic needs 9 bytes"},
      {"truncated header", [](std::string& index, std::string&) { index.resize(20); },
       "offset 18: the number of sequences"},
      {"version 0", at(9, uint64_t{0}), "offset 9: version 0"},
      {"version 2", at(9, uint64_t{2}), "offset 9: version 2"},
      {"type 0", at(17, uint8_t{0}), "offset 17: token type 0"},
      {"type 9", at(17, uint8_t{9}), "offset 17: token type 9"},
      {"type f32", at(17, uint8_t{7}), "offset 17: token type f32"},
      {"more sequences than bytes", at(18, uint64_t{5}), "offset 18: 5 sequences need"},
      {"sequences overflow", at(18, UINT64_MAX), "offset 18: 18446744073709551615 sequences"},
      {"sequences overflow by 12", at(18, UINT64_MAX / 12 + 1), "offset 18:"},
      {"boundaries overflow", at(26, UINT64_MAX / 8 + 1), "offset 26:"},
      {"no boundary", at(26, uint64_t{0}), "offset 26: no document boundary"},
      {"one boundary less", at(26, uint64_t{2}), "does not matter"},
      {"negative length", at(34, int32_t{-3}), "offset 34: sequence 0 has length -3"},
      {"length beyond", at(38, int32_t{1000}), ".bin: 10 bytes, but the index accounts for 2006"},
      {"longest length", at(38, INT32_MAX), ".bin: 10 bytes, but the index accounts for"},
      {"pointer negative", at(50, int64_t{-2}), "offset 50: sequence 1 points to byte -2"},
      {"pointer misaligned", at(50, int64_t{5}), "offset 50: sequence 1 points to byte 5"},
      {"pointer beyond", at(50, INT64_MAX), "offset 50: sequence 1 points to byte 9223372036854775807"},
      {"first pointer", at(42, int64_t{2}), "offset 42: sequence 0 points to byte 2"},
      {"documents start late", at(58, int64_t{1}), "offset 58: the first document begins at sequence 1"},
      {"documents end early", at(74, int64_t{1}), "offset 74: the last document ends at sequence 1"},
      {"documents decrease", at(66, int64_t{3}), "offset 66: document boundary 3"},
      {"documents negative", at(66, int64_t{-1}), "offset 66: document boundary -1"},
      {"one byte too many", [](std::string& index, std::string&) { index += 'x'; },
       "offset 82: 1 bytes too many"},
      {"half a token", [](std::string&, std::string& bin) { bin += 'x'; },
       ".bin: 11 bytes are not a multiple of the size of a u16 token"},
      {"a token too many", [](std::string&, std::string& bin) { bin += "xx"; },
       ".bin: 12 bytes, but the index accounts for 10"},
      {"no tokens", [](std::string&, std::string& bin) { bin.clear(); },
       ".bin: 0 bytes, but the index accounts for 10"},
  };
  const TempDirectory directory;
  write_dataset(directory / "good", {{1, 2, 3}, {4, 5}});
  const std::string index = read_file(directory / "good.idx"), bin = read_file(directory / "good.bin");
  for (const auto& test : cases) {
    CAPTURE(test.what);
    std::string bad_index = index, bad_bin = bin;
    test.damage(bad_index, bad_bin);
    write_text(directory / "bad.idx", bad_index);
    write_text(directory / "bad.bin", bad_bin);
    const auto error = error_of([&] { IndexedDataset dataset(directory / "bad"); });
    CHECK(error.starts_with("format: "));
    CHECK(error.find(directory / "bad") != std::string::npos);
    if (test.expected != std::string_view("does not matter"))
      CHECK(error.find(test.expected) != std::string::npos);
    INFO(error);
  }
  // Every truncation and every flipped byte of the index gives an error or a readable dataset.
  for (size_t size = 0; size < index.size(); ++size) {
    write_text(directory / "bad.idx", index.substr(0, size));
    write_text(directory / "bad.bin", bin);
    CHECK(!error_of([&] { IndexedDataset dataset(directory / "bad"); }).empty());
  }
  for (size_t i = 0; i < index.size(); ++i)
    for (const int flip : {1, 0x80, 0xff}) {
      std::string bad = index;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      write_text(directory / "bad.idx", bad);
      error_of([&] {
        const IndexedDataset dataset(directory / "bad");
        for (int64_t s = 0; s < dataset.sequences(); ++s) read_all(dataset, s);
      });
    }
}

TEST_CASE("a multimodal index is recognized by its size") {
  const TempDirectory directory;
  write_dataset(directory / "m", {{1, 2, 3}, {4, 5}});
  std::string index = read_file(directory / "m.idx");
  write_text(directory / "m.idx", index + std::string(2, '\0'));
  CHECK(IndexedDataset(directory / "m").multimodal());
}

TEST_CASE("files that are not there or not files") {
  const TempDirectory directory;
  CHECK(error_of([&] { IndexedDataset(directory / "no"); }).starts_with("not_found: "));
  std::filesystem::create_directory(directory / "data");
  write_dataset(directory / "data/corpus_text_document", {{1, 2, 3}});
  CHECK(error_of([&] { IndexedDataset(directory / "dat/corpus"); }) ==
        "not_found: not found: dataset = " + (directory / "dat/corpus") + "\n  help: did you mean `" +
            (directory / "data/corpus_text_document") + "`?");
  std::filesystem::create_directory(directory / "d.bin");
  CHECK(error_of([&] { IndexedDataset(directory / "d"); }).starts_with("format: "));
  REQUIRE(::mkfifo((directory / "p.bin").c_str(), 0600) == 0);
  CHECK(error_of([&] { IndexedDataset(directory / "p"); }).starts_with("format: "));
  for (const char* part : {".bin", ".idx"}) {
    CAPTURE(part);
    IndexedWriter writer(directory / "pointer", TokenType::u16);
    const std::vector<int32_t> tokens{1, 2, 3}, lengths{3};
    writer.add_document(tokens, lengths);
    writer.finish(true);
    write_text(directory / ("pointer" + std::string(part)),
               "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
    CHECK(error_of([&] {
            IndexedDataset(directory / "pointer");
          }).find(std::string(part) + "` is a Git LFS") != std::string::npos);
  }
}

TEST_CASE("a token outside the vocabulary is found when it is read, with its offset") {
  const TempDirectory directory;
  write_dataset(directory / "v", {{1, 2, 3}, {4, 500, 5}});
  const IndexedDataset dataset(directory / "v", 100);
  CHECK(read_all(dataset, 0) == std::vector<int32_t>{1, 2, 3});
  const auto error = error_of([&] { read_all(dataset, 1); });
  CHECK(error.find("v.bin: offset 8: token 500 is not below the vocabulary size 100") != std::string::npos);
  write_dataset(directory / "n", {{1, 2, 3}}, TokenType::i64);
  std::string bin = read_file(directory / "n.bin");
  poke(bin, 8, int64_t{-7});
  poke(bin, 16, int64_t{1} << 40);
  write_text(directory / "n.bin", bin);
  CHECK(error_of([&] {
          read_all(IndexedDataset(directory / "n"), 0);
        }).find("offset 8: token -7 is negative") != std::string::npos);
}

TEST_CASE("a .bin that shrinks after opening is an error, not a signal") {
  const TempDirectory directory;
  write_dataset(directory / "s", {{1, 2, 3}, {4, 5}});
  const IndexedDataset dataset(directory / "s");
  std::filesystem::resize_file(directory / "s.bin", 8);
  CHECK(error_of([&] { read_all(dataset, 1); }).find("offset 8: the file ends here") != std::string::npos);
}

TEST_CASE("a sparse file of 4 TiB is refused by its index, at once") {
  const TempDirectory directory;
  write_dataset(directory / "t", {{1, 2, 3}});
  std::error_code error;
  std::filesystem::resize_file(directory / "t.bin", uintmax_t{1} << 42, error);
  if (!error)
    CHECK(error_of([&] { IndexedDataset(directory / "t"); }).find("accounts for 6") != std::string::npos);
}

TEST_CASE("ten million documents open in a second and 200 MiB, first sample included") {
  const TempDirectory directory;
#if CAPSTAN_TIMED
  constexpr int64_t kDocuments = 10'000'000;
#else  // a sanitizer has its own memory and time
  constexpr int64_t kDocuments = 500'000;
#endif
  {
    IndexedWriter writer(directory / "large", TokenType::u16);
    constexpr int64_t kChunk = 100'000;
    std::vector<int32_t> lengths(kChunk), ones(kChunk, 1);
    std::string tokens;
    for (int64_t begin = 0; begin < kDocuments; begin += kChunk) {
      int64_t sum = 0;
      for (int64_t i = 0; i < kChunk; ++i)
        sum += lengths[static_cast<size_t>(i)] = static_cast<int32_t>((begin + i) % 5 + 1);
      tokens.resize(static_cast<size_t>(2 * sum));
      writer.add_encoded(std::as_bytes(std::span(tokens.data(), tokens.size())), lengths, ones);
    }
    writer.finish();
  }
  const int64_t before = resident_bytes();
  // Measures processor time, so that other work on the machine does not fail the test. (The test waits for no
  // I/O.)
  const auto start = std::clock();
  const auto seconds = [&] { return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC; };
  const auto dataset = std::make_shared<IndexedDataset>(directory / "large");
  const double opened = seconds();
  const CapstanOrder order({dataset, 0, dataset->sequences()}, 512, 1234);
  std::vector<int32_t> text(513);
  order.read(0, text);
  const double first = seconds();
  const int64_t after = resident_bytes();
  MESSAGE("open " << opened << " s, with the order of the first epoch " << first << " s, "
                  << (after - before) / 1e6 << " MB");
  CHECK(dataset->documents() == kDocuments);
#if CAPSTAN_TIMED
  CHECK(after - before < (int64_t{200} << 20));
  CHECK(opened < 1.0);
  CHECK(first < 1.0);
#endif
}
