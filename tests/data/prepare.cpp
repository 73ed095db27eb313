#include "data/prepare.hpp"
#include "base/json.hpp"
#include "data/inspect.hpp"
#include "data/prepare_report.hpp"

#include <doctest/doctest.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "dataset_helpers.hpp"
#include "support/sanitized.hpp"
#include "text/tokenizer/tokenizer.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

// Encodes each byte as one token, so that the text can be read back.
void encode_bytes(std::string_view text, std::vector<int32_t>& ids) {
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
}

std::vector<std::string> documents_of(const std::string& prefix) {
  const IndexedDataset dataset(prefix);
  std::vector<std::string> documents;
  for (int64_t d = 0; d < dataset.documents(); ++d) {
    std::string text;
    for (int64_t s = dataset.document_begin(d); s < dataset.document_begin(d + 1); ++s) {
      std::vector<int32_t> ids(static_cast<size_t>(dataset.length(s)));
      dataset.read(s, 0, ids);
      for (const int32_t id : ids) text.push_back(id < 256 ? static_cast<char>(id) : '$');
    }
    documents.push_back(text);
  }
  return documents;
}

struct Prepared {
  TempDirectory directory;
  PrepareOptions options;
  PrepareResult result;
  Prepared() {
    options.output_prefix = directory / "out";
    options.vocab_size = 257;
    options.overwrite = true;
  }
  // Writes `content` as a file of that name, prepares it, and returns its documents.
  std::vector<std::string> run(const std::string& name, std::string_view content, int threads = 2) {
    write_text(directory / name, content);
    options.inputs = {directory / name};
    return again(threads);
  }
  std::vector<std::string> again(int threads = 2) {
    ThreadPool pool(threads);
    result = prepare(options, encode_bytes, pool);
    return documents_of(result.keys[0].prefix);
  }
  std::string error(const std::string& name, std::string_view content) {
    return error_of([&] { run(name, content); });
  }
};

using Documents = std::vector<std::string>;

std::string gzip(std::string_view text) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
std::string zstd(std::string_view text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

}  // namespace

TEST_CASE(
    "JSON lines: strings, lists of strings, empty values, escapes, blank lines, CRLF, a byte order mark") {
  Prepared prepared;
  CHECK(prepared.run("a.jsonl",
                     "\xEF\xBB\xBF{\"text\": \"one\"}\r\n"
                     "\n  \n"
                     "{\"id\": 7, \"text\": [\"two \", \"\", \"three\"], \"more\": {\"text\": \"no\"}}\n"
                     "{\"text\": \"\"}\n"
                     "{\"text\": []}\n"
                     "{\"text\": \"a\\n\\u00e9\\ud83d\\ude00\\\"\\\\\"}\n"
                     "{\"text\": \"first\", \"text\": \"last wins\"}") ==
        Documents{"one", "two three", "", "", "a\n\xC3\xA9\xF0\x9F\x98\x80\"\\", "last wins"});
  const auto& key = prepared.result.keys[0];
  CHECK(key.prefix == prepared.directory / "out_text_document");
  CHECK(key.documents == 6);
  CHECK(key.empty_documents == 2);
  CHECK(key.sequences == 5);  // a list's empty string gives none
  CHECK(key.tokens == 3 + 9 + 10 + 9);
  CHECK(prepared.result.records == 6);
  CHECK(prepared.result.type == TokenType::u16);
}

TEST_CASE("the end-of-document token joins the last sequence, and only where there are tokens") {
  Prepared prepared;
  prepared.options.append_eod = true;
  prepared.options.eod = 256;
  CHECK(prepared.run("a.jsonl", "{\"text\": [\"ab\", \"c\"]}\n{\"text\": \"\"}\n{\"text\": \"d\"}\n") ==
        Documents{"abc$", "", "d$"});
  const IndexedDataset dataset(prepared.result.keys[0].prefix);
  CHECK(dataset.length(0) == 2);
  CHECK(dataset.length(1) == 2);
  CHECK(dataset.length(2) == 2);
  CHECK(dataset.document_begin(1) == 2);
  CHECK(dataset.document_begin(2) == 2);
}

TEST_CASE("a large vocabulary is stored in 32 bits") {
  Prepared prepared;
  prepared.options.vocab_size = 65500;
  prepared.run("a.jsonl", "{\"text\": \"abc\"}");
  CHECK(prepared.result.type == TokenType::i32);
  CHECK(read_file(prepared.directory / "out_text_document.bin").size() == 12);
}

TEST_CASE("the directory of the output is made") {
  Prepared prepared;
  prepared.options.output_prefix = prepared.directory / "data/of/mine";
  CHECK(prepared.run("a.jsonl", "{\"text\": \"abc\"}") == std::vector<std::string>{"abc"});
}

TEST_CASE("several keys make several datasets; a bad record is missing in all of them") {
  Prepared prepared;
  prepared.options.json_keys = {"q", "a"};
  prepared.options.on_bad_line = OnBadLine::skip;
  CHECK(prepared.run("a.jsonl", "{\"q\":\"1\",\"a\":\"2\"}\n{\"q\":\"3\"}\n{\"a\":\"5\",\"q\":\"4\"}") ==
        Documents{"1", "4"});
  CHECK(documents_of(prepared.directory / "out_a_document") == Documents{"2", "5"});
  CHECK(prepared.result.skipped == 1);
}

TEST_CASE("a JSON array is streamed element by element") {
  Prepared prepared;
  CHECK(prepared.run("a.json",
                     "\n [ {\"text\":\"a]\\\"}\"} ,\n\n{\"text\":\n "
                     "\"b\"}\n,{\"text\":[\"c\",\"d\"],\"x\":[[{}]]}]\n ") == Documents{"a]\"}", "b", "cd"});
  CHECK(prepared.error("e.json", "[]").find("no document") != std::string::npos);
  const std::pair<const char*, const char*> bad[] = {
      {"[{\"text\":\"a\"}", "e.json:1:14: the JSON array is not closed"},
      {"[{\"text\":\"a\"},]", "e.json:1:15: expected an element"},
      {"[,{\"text\":\"a\"}]", "e.json:1:2: expected an element"},
      {"[{\"text\":\"a\"} {\"text\":\"b\"}]", "e.json:1:15: expected `,` or `]`"},
      {"[{\"text\":\"a\"}] x", "e.json:1:16: there is more after the JSON array"},
      {"[\n{\"text\":\"a\"},\n  {\"text\":\"b", "e.json:3:3: the JSON array ends inside"},
      {"[\n{\"text\":\"a\"},\n  {\"text\": 3}]", "e.json:3:3: key `text` is a number"},
      {"[}", "e.json:1:2: a closing bracket"},
      {"[{\"text\":\"\xC3\xA9\"}, nul]", "e.json:1:19: not JSON"},
  };
  for (const auto& [text, expected] : bad) {
    CAPTURE(text);
    const auto error = prepared.error("e.json", text);
    CAPTURE(error);
    CHECK(error.find(expected) != std::string::npos);
  }
}

TEST_CASE("bad lines are errors with location and reason, or skipped and counted") {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"text\": \"x\"", "e.jsonl:2:13: not JSON: "},
      {"{\"text\": nope}", "e.jsonl:2:11: not JSON: "},
      {"{'text': 1}", "e.jsonl:2:2: not JSON: "},
      {"[1]", "e.jsonl:2:1: expected an object, not a list"},
      {"\"just text\"", "e.jsonl:2:1: expected an object, not a string"},
      {"{\"txt\": \"x\"}", "e.jsonl:2:1: no key `text`"},
      {"{\"text\": null}", "key `text` is null, not a string or a list of strings"},
      {"{\"text\": 1.5}", "key `text` is a number"},
      {"{\"text\": true}", "key `text` is true or false"},
      {"{\"text\": {}}", "key `text` is an object"},
      {"{\"text\": [\"a\", 1]}", "key `text` is a list with a number in it"},
      {"{\"text\": \"\xC3\xA9\xFF\"}", "e.jsonl:2:12: invalid UTF-8"},
      {"{\"text\": \"\xED\xA0\x80\"}", "e.jsonl:2:11: invalid UTF-8"},
      {"{\"text\": \"\\ud800\"}", "not JSON: "},
      {"{\"text\": \"a\tb\"}", "e.jsonl:2:12: not JSON: "},
      {"{\"text\": \"a\"} {\"text\": \"b\"}", "e.jsonl:2:15: not JSON: "},
      {"{\"text\": \"a\", \"n\": 1e999}", "not JSON: "},
  };
  for (const auto& [line, expected] : cases) {
    CAPTURE(line);
    const std::string text = std::string("{\"text\": \"good\"}\n") + line + "\n{\"text\": \"also good\"}\n";
    Prepared failing;
    const auto error = failing.error("e.jsonl", text);
    CAPTURE(error);
    CHECK(error.starts_with("format: "));
    CHECK(error.find(expected) != std::string::npos);
    CHECK(!std::filesystem::exists(failing.directory / "out_text_document.bin"));
    int files = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(failing.directory.path()))
      ++files;
    CHECK(files == 1);  // nothing but the input
    Prepared skipping;
    skipping.options.on_bad_line = OnBadLine::skip;
    CHECK(skipping.run("e.jsonl", text) == Documents{"good", "also good"});
    CHECK(skipping.result.skipped == 1);
    REQUIRE(skipping.result.reports.size() == 1);
    CHECK(skipping.result.reports[0].find(expected) != std::string::npos);
  }
  Prepared zero;
  CHECK(zero.error("z.jsonl", std::string("{\"text\": \"a") + '\0' + "b\"}\n").find("z.jsonl:1:") !=
        std::string::npos);
  Prepared nothing;
  nothing.options.on_bad_line = OnBadLine::skip;
  CHECK(nothing.error("e.jsonl", "bad\nbad\n").find("all 2 records are bad") != std::string::npos);
}

TEST_CASE("a Git LFS pointer is no text, and a web page no JSON") {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
  for (const char* name : {"a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst"}) {
    CAPTURE(name);
    for (const OnBadLine bad : {OnBadLine::fail, OnBadLine::skip}) {
      Prepared prepared;
      prepared.options.on_bad_line = bad;
      CHECK(prepared.error(name, pointer).find("is a Git LFS pointer") != std::string::npos);
    }
  }
  for (const char* name : {"a.jsonl", "a.txt.gz"}) {
    Prepared page;
    CHECK(page.error(name, "<!DOCTYPE html><html></html>").find("is an HTML page") != std::string::npos);
  }
  Prepared text;
  CHECK(text.run("a.txt", "<html>x</html>\n").size() == 1);
}

TEST_CASE("depth and length have budgets") {
  Prepared prepared;
  prepared.options.on_bad_line = OnBadLine::skip;
  const std::string deep =
      "{\"text\": \"x\", \"n\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  CHECK(prepared.run("d.jsonl", deep + "\n{\"text\": \"good\"}\n") == Documents{"good"});
  prepared.options.records.max_record_bytes = 1000;
  const std::string long_line = "{\"text\": \"" + std::string(5'000'000, 'x') + "\"}";
  CHECK(prepared.run("l.jsonl", "{\"text\": \"a\"}\n" + long_line + "\n{\"text\": \"b\"}") ==
        Documents{"a", "b"});
  CHECK(prepared.result.reports[0].find("l.jsonl:2:1: longer than 1000 B, the limit") != std::string::npos);
  CHECK(prepared.run("l.json", "[{\"text\": \"a\"},\n" + long_line + ",{\"text\": \"b\"}]") ==
        Documents{"a", "b"});
  CHECK(prepared.result.reports[0].find("l.json:2:1: longer") != std::string::npos);
  CHECK(prepared.run("l.txt", "a\n\n" + std::string(5000, 'y') + "\nz\n\nb\n") == Documents{"a", "b"});
  CHECK(prepared.result.reports[0].find("l.txt:3:1: longer") != std::string::npos);
}

TEST_CASE("plain text: blank lines, a separator, files") {
  Prepared prepared;
  const std::string text = "\n\nfirst line\nsecond line\n\n  \nnext\r\n\r\nlast \xC3\xA9";
  CHECK(prepared.run("a.txt", text) == Documents{"first line\nsecond line", "next", "last \xC3\xA9"});
  prepared.options.records.split = TextSplit::separator;
  CHECK(prepared.run("fortunes", "%\none\n\ntwo\n%\n%\nthree\n%%\n%\n") ==
        Documents{"one\n\ntwo", "three\n%%"});
  CHECK(prepared.run("crlf", "one\r\n%\r\ntwo\r\n") == Documents{"one", "two"});
  prepared.options.records.separator = "-- next --";
  CHECK(prepared.run("b.txt", "one\n%\n-- next --\ntwo") == Documents{"one\n%", "two"});
  prepared.options.records.split = TextSplit::file;
  CHECK(prepared.run("c.txt", text) == Documents{text});
  prepared.options.records.split = TextSplit::automatic;
  CHECK(prepared
            .error("bad.txt",
                   "good\n\nline\nb\xFF"
                   "d")
            .find("bad.txt:4:2: invalid UTF-8") != std::string::npos);
  CHECK(prepared.error("empty.txt", "\n \n").find("holds no document") != std::string::npos);
  // The format can be set to JSON for any file name.
  prepared.options.records.format = InputFormat::json;
  CHECK(prepared.run("x.txt", "{\"text\": \"j\"}") == Documents{"j"});
}

TEST_CASE("a directory gives its files in order, one document each, without hidden files and links") {
  Prepared prepared;
  namespace fs = std::filesystem;
  fs::create_directories(prepared.directory / "tree/sub/.git");
  write_text(prepared.directory / "tree/b.txt", "B\n\nB\n");
  write_text(prepared.directory / "tree/a.cpp", "A");
  write_text(prepared.directory / "tree/sub/c.jsonl", "{\"text\": \"C1\"}\n{\"text\": \"C2\"}\n");
  write_text(prepared.directory / "tree/.hidden", "no");
  write_text(prepared.directory / "tree/sub/.git/config", "no");
  write_text(prepared.directory / "tree/empty", "");
  fs::create_symlink("b.txt", prepared.directory / "tree/link");
  fs::create_directory_symlink("..", prepared.directory / "tree/sub/up");
  write_text(prepared.directory / "z.txt", "Z1\n\nZ2");
  prepared.options.inputs = {prepared.directory / "z.txt", prepared.directory / "tree"};
  CHECK(prepared.again() == Documents{"Z1", "Z2", "A", "B\n\nB\n", "C1", "C2"});
  CHECK(prepared.result.files == 5);
  CHECK(error_of([&] { expand_inputs({prepared.directory / "missing"}); }).starts_with("not_found: "));
  fs::create_directory(prepared.directory / "bare");
  CHECK(error_of([&] { expand_inputs({prepared.directory / "bare"}); }).starts_with("format: "));
  CHECK(error_of([&] { expand_inputs({"/dev/null"}); }).starts_with("format: "));
}

TEST_CASE("gzip and zstd: members and frames in a row, truncation, damage, bombs") {
  std::string text;
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) text += "{\"text\": \"" + std::to_string(random()) + "\"}\n";
  const size_t half = text.find('\n', text.size() / 2) + 1;
  Prepared plain;
  const auto expected = plain.run("a.jsonl", text);
  CHECK(expected.size() == 20000);
  const auto pack = [&](const std::string& kind, std::string_view part) {
    return kind == "gz" ? gzip(part) : zstd(part);
  };
  for (const std::string kind : {"gz", "zst"}) {
    CAPTURE(kind);
    Prepared packed;
    CHECK(packed.run("a.jsonl." + kind, pack(kind, text)) == expected);
    CHECK(packed.run("b.jsonl." + kind, pack(kind, text.substr(0, half)) + pack(kind, text.substr(half))) ==
          expected);
    CHECK(packed.run("t.txt." + kind, pack(kind, "one\n\ntwo\n")) == Documents{"one", "two"});
    const std::string compressed = pack(kind, text);
    for (const size_t size : {size_t{5}, compressed.size() / 2, compressed.size() - 1}) {
      const auto error = packed.error("c.jsonl." + kind, compressed.substr(0, size));
      CHECK(error.find("c.jsonl." + kind + ": offset " + std::to_string(size) +
                       ": the compressed data end too early") != std::string::npos);
    }
    std::string damaged = compressed;
    for (size_t i = compressed.size() / 2; i < compressed.size() / 2 + 64; ++i)
      damaged[i] = static_cast<char>(damaged[i] ^ 0x5a);
    const auto error = packed.error("d.jsonl." + kind, damaged);
    CHECK(error.starts_with("format: "));
    CHECK(packed.error("e.jsonl." + kind, text).find("corrupt") != std::string::npos);
    // A compressed file of few bytes that expands to 100 MB of zeros.
    packed.options.records.limits.free_bytes = 1 << 20;
    packed.options.records.split = TextSplit::file;
    const auto bomb = packed.error("bomb.txt." + kind, pack(kind, std::string(100'000'000, 'x')));
    CHECK(bomb.find("decompresses to more than 250 times its size") != std::string::npos);
  }
}

TEST_CASE("the bytes do not depend on the number of threads, nor documents on the batches") {
  std::string text;
  std::mt19937 random(7);
  std::vector<std::string> expected;
  for (int i = 0; i < 3000; ++i) {
    expected.push_back(std::string(random() % 12000, static_cast<char>('a' + i % 26)));
    text += "{\"text\": \"" + expected.back() + "\"}\n";
  }
  std::string bin, index;
  const std::vector<int> few{1, 3}, all{1, 2, 3, 8};
  for (const int threads : test::kSanitized ? few : all) {
    Prepared prepared;
    prepared.options.append_eod = true;
    prepared.options.eod = 256;
    const auto documents = prepared.run("a.jsonl", text, threads);
    const auto now_bin = read_file(prepared.directory / "out_text_document.bin");
    const auto now_index = read_file(prepared.directory / "out_text_document.idx");
    if (threads == 1) {
      bin = now_bin, index = now_index;
      for (auto& document : expected)
        if (!document.empty()) document += '$';
      CHECK(documents == expected);
    }
    CHECK(now_bin == bin);
    CHECK(now_index == index);
  }
}

TEST_CASE("progress is reported; a tokenizer's failure names the record; a wrong token is a bug of ours") {
  Prepared prepared;
  std::vector<PrepareProgress> reports;
  prepared.options.progress = [&](const PrepareProgress& progress) { reports.push_back(progress); };
  std::string text;
  for (int i = 0; i < 12; ++i) text += "{\"text\": \"" + std::string(1 << 20, 'x') + "\"}\n";
  prepared.run("a.jsonl", text, 1);
  REQUIRE(reports.size() >= 2);
  CHECK(reports.back().documents == 12);
  CHECK(reports.back().file_bytes == static_cast<int64_t>(text.size()));
  CHECK(reports.back().file_bytes_total == static_cast<int64_t>(text.size()));
  CHECK(reports.front().documents < 12);
  CHECK(reports.back().text_bytes_per_second > 0);
  CHECK(to_text(reports.back()).find("100 %") != std::string::npos);
  CHECK(to_text(prepared.result).find("12 documents") != std::string::npos);
  CHECK(capstan::json_of(to_json(prepared.result))["datasets"][0]["documents"] == 12);

  ThreadPool pool(2);
  const auto error = error_of([&] {
    prepare(
        prepared.options, [](std::string_view, std::vector<int32_t>&) { fail(ErrorCode::internal, "no"); },
        pool);
  });
  CHECK(error.find("while tokenizing") != std::string::npos);
  CHECK(error_of([&] {
          prepare(
              prepared.options, [](std::string_view, std::vector<int32_t>& ids) { ids = {70000}; }, pool);
        }).starts_with("internal: "));
}

TEST_CASE("options that make no sense are usage errors") {
  const auto refused = [](auto change) {
    Prepared prepared;
    change(prepared.options);
    return prepared.error("a.jsonl", "{\"text\": \"a\"}").starts_with("usage: ");
  };
  CHECK(refused([](PrepareOptions& o) { o.json_keys = {}; }));
  CHECK(refused([](PrepareOptions& o) { o.json_keys = {"a", "a"}; }));
  CHECK(refused([](PrepareOptions& o) { o.json_keys = {"../x"}; }));
  CHECK(refused([](PrepareOptions& o) { o.output_prefix = "dir/"; }));
  CHECK(refused([](PrepareOptions& o) { o.append_eod = true; }));
}

TEST_CASE("from text to a dataset and back with the byte tokenizer") {
  const TempDirectory directory;
  write_text(directory / "fortunes", "be\n%\ncalm\n");
  const auto tokenizer = text::Tokenizer::load("bytes");
  ThreadPool pool(2);
  PrepareOptions options;
  options.inputs = {directory / "fortunes"};
  options.output_prefix = directory / "f";
  options.append_eod = true;
  options.records.split = TextSplit::separator;
  options.records.separator = "%";
  const auto result = prepare(options, *tokenizer, "bytes", pool);
  CHECK(result.keys[0].documents == 2);
  CHECK(result.keys[0].tokens == 2 + 4 + 2);
  CHECK(to_text(result).find("2 documents, 8 tokens") != std::string::npos);
  InspectOptions look;
  look.tokenizer = tokenizer.get();
  for (const char* name : {"f_text_document", "f_text_document.idx", "f"}) {
    const auto report = inspect(directory / name, look);
    CHECK(report.samples[1].ids == std::vector<int32_t>{'c', 'a', 'l', 'm', 256});
    CHECK(report.samples[1].text.starts_with("calm"));
  }
}
